"""Cells, ranks and steppers of claims, made as the harness makes them: from an experiment, not by hand."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.config.load import parse_experiment
from harness.measure.stepper import Stepper, TrainingData
from harness.measure.window import Window
from harness.plan.cell import Cell
from harness.plan.grid import expand
from harness.plan.inventory import Machine
from harness.train import workloads
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.gpu.verdict import NotRun

SMALL: Mapping[str, Any] = {"model": "resnet8", "data": "digits", "per_device_batch_size": 32}
"""A network that a CPU trains in milliseconds; ``cell_of`` gives it 8 channels."""

CLOCKS_S = 1.5
"""Seconds of steps on a GPU before a claim times any."""


def cell_of(device: torch.device, grid: Mapping[str, Any], *, devices: int = 1, **sections: Any) -> Cell:
    """Return the one cell of a grid on this device; more ``devices`` than one share it."""
    width = {"workload_options": {"width": 8}} if grid.get("model") == "resnet8" else {}
    content = {"name": "acceptance", "grid": {**grid, "devices": devices}, "device": device.type, **width, **sections}
    experiment = parse_experiment({"oversubscribe": devices > 1, **content}, source="tests.gpu")
    (cell,) = expand(experiment, Machine(device.type, 1, (1,), compiler=True)).asked
    return cell


def one_rank(device: torch.device, slots: int = 1) -> Ranks:
    """Return the only rank of a group; with several slots the device stands for several."""
    return Ranks(0, 1, 0, 0, "here", "127.0.0.1", (device,) * slots)


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Open a process group of this process alone, with the backends of a worker group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def stepper_of(cell: Cell, device: torch.device, ranks: Ranks | None = None, workload: Any = None) -> Stepper:
    """Return a stepper of the cell, on one rank or as one of several; ``workload``: one that no experiment names."""
    workload = workload or workloads.build(cell)
    ranks = ranks or one_rank(device, cell.devices if cell.traits.one_process else 1)
    training = Training(cell, workload, 0, ranks)
    return Stepper(training, TrainingData(cell, 0, ranks, *workload.datasets(), workload), lambda: None)


def steps_for(stepper: Stepper, seconds: float, warm_up: int = 20) -> int:
    """Return the steps that take so long, at least 5; warms up before."""
    stepper.window("warmup", warm_up, detailed=False)
    if stepper.ranks.devices[0].type == "cuda":  # clocks take seconds to settle
        pace = pace_s(stepper.window("warmup", warm_up, detailed=False))
        stepper.window("warmup", stepper.ranks.broadcast(round(CLOCKS_S / pace)) or 1, detailed=False)
    return max(5, round(seconds / pace_s(stepper.window("warmup", max(5, warm_up // 2), detailed=False))))


def pace_s(window: Window) -> float:
    """Return the seconds of a step: the window's duration over its steps."""
    return window.duration_s / window.steps


def median_pace_s(windows: list[Window]) -> float:
    return statistics.median(map(pace_s, windows))


KEPT = "HARNESS_ACCEPTANCE_OUTPUT"


def kept() -> Path | None:
    """Return the folder of --output, for what a claim leaves to be looked at; None without it."""
    folder = os.environ.get(KEPT)
    return Path(folder) if folder else None


MOST_KEPT_BYTES = 2 * 2**20


def keep(name: str, content: object) -> None:
    """Write what a claim has read, as compressed JSON, into the folder of --output: for later tests without a GPU.

    Nothing is written without --output, and of content that takes more than MOST_KEPT_BYTES a note.
    """
    if (folder := kept()) is None:
        return
    data = gzip.compress(json.dumps(content).encode())
    if len(data) > MOST_KEPT_BYTES:
        data = gzip.compress(json.dumps({"left out": f"{len(data)} bytes, at most {MOST_KEPT_BYTES}"}).encode())
    (folder / f"{name}.json.gz").write_bytes(data)


def need_cuda(device: torch.device) -> None:
    """Raise NotRun on a CPU."""
    if device.type != "cuda":
        raise NotRun("needs a GPU")
