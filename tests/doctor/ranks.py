"""Examine workloads as one rank, in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.doctor import speed, validation
from harness.doctor.examine import DoctorTrialFailed, examine
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.ranks import Ranks
from tests.doctor.faulty import FAULTS, HEALTHY, NeedsMany, OneSlowRank
from tests.doctor.scripts import SCRIPTS

CPU = torch.device("cpu")
SMALL = ("conv_stack", "mlp", "segmentation", "padded_sequences", "emulated_compute")
BUILTIN = [("image_classification", "resnet8"), ("language_model", "nano"), *((name, "small") for name in SMALL)]
"""The built-in workloads, each with a model; a larger one has the same code."""
BUILTIN_PLACED = [(*each, strategy) for each in BUILTIN for strategy in ("dp", "ddp")]
BUILTIN_PLACED += [("language_model", "nano", strategy) for strategy in ("single", "fsdp")]
"""Each in both ways of several devices; the one with units of layers in all."""
TIMED = {("slow rank", "warning"), ("loader throughput", "warning"), ("loader throughput", "note")}
"""Check and severity of the findings that compare times."""
SHORT = {"padded_sequences": {"longest": 64, "text_bytes": 20_000}}
"""Options of workloads whose default data takes most of the time of all others together."""


def cell_for(strategy: str, devices: int, batch: int = 64) -> Cell:
    """A cell as the planner would make it."""
    sgd = {"name": "SGD", "lr": 0.05}
    return Cell("w", None, None, strategy, "cpu", devices, 1, "weak", batch // devices, batch, optimizer=sgd)


def subject_of(workload: Any, cell: Cell | None = None, devices: int = 1, **more: Any) -> Subject:
    """A workload, by default under one device, on the only rank, which has this many devices."""
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,) * devices)
    return Subject(cell or cell_for("single", 1), workload, workload.datasets(), 0, ranks, **more)


def look(workload: type[Any], strategy: str, rank: int, world_size: int) -> dict[str, Any]:
    """What the doctor says of a workload, as this rank hears it."""
    devices, ranks = ranks_for(strategy, rank, world_size)
    planted = {check for check, pairs in FAULTS.items() if (workload, strategy) in pairs}
    return examined_workload(workload(), cell_for(strategy, devices, workload.batch), ranks, planted)


def ranks_for(strategy: str, rank: int, world_size: int) -> tuple[int, Ranks]:
    """The number of devices, and who this rank is."""
    devices = 2 if strategy == "dp" else world_size
    return devices, Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (CPU,) * (devices if strategy == "dp" else 1))


def examined_workload(workload: Any, cell: Cell, ranks: Ranks, planted: Set[str] = frozenset()) -> dict[str, Any]:
    """What the doctor says of a cell, and in how many seconds; of the checks that compare times, what is ``planted``.

    A planted delay is many times what the check allows; of a workload without one they may speak, since the processors
    are shared with other tests: how they judge is in test_judges.py.
    """
    threads = torch.get_num_threads()
    start = time.perf_counter()
    try:
        subject = Subject(
            cell, workload, workload.datasets(), 0, ranks, epochs=getattr(workload, "epochs", False), explains=True
        )
        found = examine(subject).facts
        seen = [(one, (one["check"], one["severity"])) for one in found["findings"]]
        found["findings"] = [one for one, kind in seen if kind[0] in planted or kind not in TIMED]
    except DoctorTrialFailed as error:
        found = {**error.facts, "raised": str(error)}
    torch.set_num_threads(threads)
    return {**found, "seconds": time.perf_counter() - start}


def look_at_builtin(name: str, model: str, strategy: str, rank: int, world_size: int) -> dict[str, Any]:
    """The same of a built-in workload, at a batch of 4 for each device."""
    devices, ranks = ranks_for(strategy, rank, world_size)
    named = {"workload": name, "model": model, "data": BUILTIN_WORKLOADS[name].data}
    options = {"workload_options": SHORT.get(name, {}), "optimizer": {"name": "SGD", "lr": 0.01}}
    cell = replace(cell_for(strategy, devices, 4 * devices), **named, **options)
    return examined_workload(workloads.build(cell), cell, ranks)


def main(rank: int, world_size: int, out: Path) -> None:
    """Every workload whose strategy needs this many processes."""
    speed.SECONDS = 0.15  # small nets: this is many batches
    validation.SECONDS = 5.0  # of which a pause of the machine is a small part
    speed.PAUSE_S = 0.01  # a rank that is slow here stays slow
    pairs: list[tuple[type[Any], str]] = [*HEALTHY, *(pair for pairs in FAULTS.values() for pair in pairs)]
    pairs += [*((script, script.strategy) for script in SCRIPTS), (NeedsMany, "ddp"), (NeedsMany, "single")]
    mine = [p for p in dict.fromkeys(pairs) if (p[1] in ("ddp", "fsdp")) == (world_size > 1)]
    mine.sort(key=lambda pair: pair[0] is OneSlowRank)  # it spoils its process
    examined = {
        f"{name} {model} {strategy}": look_at_builtin(name, model, strategy, rank, world_size)
        for name, model, strategy in BUILTIN_PLACED
        if (strategy in ("ddp", "fsdp")) == (world_size > 1)
    }
    examined |= {f"{kind.__name__} {strategy}": look(kind, strategy, rank, world_size) for kind, strategy in mine}
    if rank == 0:
        out.write_text(json.dumps(examined))
