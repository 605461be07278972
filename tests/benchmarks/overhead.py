"""What the harness's loop adds to a step: ``python -m tests.benchmarks.overhead``.

A bare loop, written by hand as a tutorial would, and the harness's window alternate in one process on the same wrapped
model, optimizer and stream of batches, garbage collection off in both. Paired by window are the ratio of their step
times, each the median of a window's steps, and the ratio of the whole windows, in which the rare slow step counts too.
A process says the median of its ratios: what other work interrupts says nothing of the loop, however long it took.
Where its code and data come to lie in memory is the same for all of its windows, so that processes differ by more than
the windows of one: it is done again in fresh ones. Shown is their geometric mean with its 95 % interval (t on the
logarithms). The upper end for the step time is to be at most 1.01. Takes about twelve minutes.

With ``--device cuda`` the host runs ahead of the GPU, so that only whole windows, from one synchronisation to the next,
have a time: both ratios are then theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.analysis.stats import Estimate, geometric_mean
from harness.measure.stepper import Stepper
from harness.measure.window import phases_are_cheap, synchronize
from harness.plan.cell import Cell
from harness.system.process import no_garbage_collection
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads.image_classification import ImageClassification
from tests.benchmarks.figures import measured_apart, write_figures

TARGET = 1.01


class SmallMlp:
    """About a millisecond a step on one core: where the harness's own work would show most."""

    unit = "samples"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def datasets(self) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4096, 128, generator=generator)
        y = torch.randint(0, 10, (4096,), generator=generator)
        return TensorDataset(x, y), TensorDataset(x, y)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(x)))


WORKLOADS: dict[str, Callable[[], Any]] = {
    "small ResNet": lambda: ImageClassification(data="digits", model="resnet8", width=8),
    "small MLP": SmallMlp,
}
BATCHES = {"small ResNet": 32, "small MLP": 64}


@dataclass(frozen=True)
class Timed:
    """One window: the median of its steps' times, and the mean, which is the window's time a step (seconds)."""

    median_s: float
    mean_s: float


def bare_loop(stepper: Stepper, workload: Any, batch_size: int, steps: int) -> Timed:
    """So many steps, as one writes them without a harness who wants to know how long each takes."""
    model, optimizer, fetch = stepper.training.model, stepper.training.optimizer, stepper.fetch
    (device,) = stepper.ranks.devices
    on_gpu = device.type == "cuda"
    with no_garbage_collection():
        synchronize([device])
        times = [time.perf_counter()]
        for _ in range(steps):
            batch: Any = next(fetch)
            if on_gpu:
                batch = [tensor.to(device, non_blocking=True) for tensor in batch]
            optimizer.zero_grad(set_to_none=True)
            loss, _ = workload.loss(model, batch)
            (loss / batch_size).backward()
            optimizer.step()
            times.append(time.perf_counter())
        synchronize([device])
        mean_s = (time.perf_counter() - times[0]) / steps
    return _timed(device, [end - start for start, end in pairwise(times)], mean_s)


def _timed(device: torch.device, step_s: Sequence[float], mean_s: float) -> Timed:
    """The times of a window; on a GPU its single steps have none that both loops can read at the same cost."""
    return Timed(statistics.median(step_s) if device.type == "cpu" else mean_s, mean_s)


def harness_loop(stepper: Stepper, steps: int, detailed: bool) -> Timed:
    """As many in one of the harness's windows."""
    window = stepper.window("timed", steps, detailed=detailed).window
    return _timed(stepper.ranks.devices[0], window.step_s, window.duration_s / steps)


def compare(name: str, strategy: str, pairs: int, window_s: float, device: torch.device) -> list[tuple[Timed, Timed]]:
    """So many pairs of windows: the harness's, the bare loop's."""
    workload, batch = WORKLOADS[name](), BATCHES[name]
    optimizer = {"name": "SGD", "lr": 0.001}
    cell = Cell("w", None, None, strategy, device.type, 1, 1, "weak", batch, batch, optimizer=optimizer)
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (device,))
    training = Training(cell, workload, 0, ranks)
    stepper = Stepper(training, workload.datasets()[0], cell, 0, ranks, collate=None, advance=lambda: None)
    bare_loop(stepper, workload, batch, 20)
    pace_s = bare_loop(stepper, workload, batch, 50).mean_s
    steps, detailed = max(5, math.ceil(window_s / pace_s)), phases_are_cheap(device, 1, pace_s)
    ours, bare = [], []
    for number in range(pairs):
        first_bare = number % 2 == 0  # each goes first as often
        for which in (first_bare, not first_bare):
            if which:
                bare.append(bare_loop(stepper, workload, batch, steps))
            else:
                ours.append(harness_loop(stepper, steps, detailed))
    return list(zip(ours, bare, strict=True))


def one_process(models: Sequence[str], pairs: int, window_s: float, device: torch.device) -> list[dict[str, Any]]:
    """A row for each model and strategy: the bare step's seconds, and the ratios for a step and for a window."""
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rows = []
    for name in models:
        for strategy in ("single", "ddp"):
            seen = compare(name, strategy, pairs, window_s, device)
            row: dict[str, Any] = {"model": name, "strategy": strategy}
            row["step_s"] = statistics.median(bare.median_s for _, bare in seen)
            row["step"] = statistics.median(ours.median_s / bare.median_s for ours, bare in seen)
            row["window"] = statistics.median(ours.mean_s / bare.mean_s for ours, bare in seen)
            rows.append(row)
    dist.destroy_process_group()
    return rows


def _shown(estimate: Estimate) -> str:
    ends = f" ({estimate.low:.4f} to {estimate.high:.4f})" if estimate.high else ""
    return f"{estimate.value:.4f}{ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8, help="fresh processes, each with all of the pairs")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of windows for each line in each process")
    parser.add_argument("--window", type=float, default=0.1, help="seconds of a window")
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures of every process to this file too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
        sys.stdout.write(json.dumps(one_process(asked.models, asked.pairs, asked.window, device)))
        return 0
    one = ["--one", "--pairs", str(asked.pairs), "--window", str(asked.window), "--models", *asked.models]
    result = [measured_apart("overhead", *one, "--device", asked.device) for _ in range(asked.processes)]
    title = f"Harness over a bare loop: {asked.processes} processes of {asked.pairs} pairs of {asked.window:g} s"
    headings = ("model", "strategy", "bare step (ms)", "step time", f"at most {TARGET}", "whole window")
    table = Table(*headings, title=title)
    missed = False
    for line in zip(*result, strict=True):
        step, window = (geometric_mean([row[what] for row in line]) for what in ("step", "window"))
        step_s = statistics.median(row["step_s"] for row in line)
        met = "-" if step.high is None else "yes" if step.high <= TARGET else "no"
        missed |= met == "no"
        table.add_row(line[0]["model"], line[0]["strategy"], f"{1000 * step_s:.2f}", _shown(step), met, _shown(window))
    Console(width=130).print(table)
    if asked.json:
        write_figures(asked.json, result)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
