"""What the harness's loop adds to a step: ``python -m tests.benchmarks.overhead``.

A bare loop, written by hand as a tutorial would, and the harness's window alternate in one process on the same wrapped
model, optimizer and stream of batches, garbage collection off in both. The ratio of their times a step is paired by
window. Shown is the median of the ratios with its distribution-free 95 % interval (order statistics: Conover, Practical
Nonparametric Statistics, section 3.2): a window that other work interrupts says nothing of the loop, however long it
took. The upper end is to be at most 1.01.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import binom
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.cell import Cell
from harness.measure.stepper import Stepper
from harness.measure.window import no_garbage_collection
from harness.ranks import Ranks
from harness.training import Training
from harness.workloads.image_classification import ImageClassification

CPU = torch.device("cpu")
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


def bare_loop(stepper: Stepper, workload: Any, batch_size: int, steps: int) -> float:
    """Seconds of so many steps, as one writes them without a harness."""
    model, optimizer, fetch = stepper.training.model, stepper.training.optimizer, stepper.fetch
    with no_garbage_collection():
        start = time.perf_counter()
        for _ in range(steps):
            batch = next(fetch)
            optimizer.zero_grad(set_to_none=True)
            loss, _ = workload.loss(model, batch)
            (loss / batch_size).backward()
            optimizer.step()
        return time.perf_counter() - start


def median_of(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The median, and the order statistics between which the true one lies with at least this confidence."""
    ordered, n = sorted(ratios), len(ratios)
    outside = int(binom.ppf((1 - confidence) / 2, n, 0.5))
    return statistics.median(ordered), ordered[max(0, outside - 1)], ordered[min(n - 1, n - outside)]


def compare(name: str, strategy: str, pairs: int, window_s: float) -> tuple[list[float], float]:
    """Harness over bare, time a step; and the bare step in seconds."""
    workload, batch = WORKLOADS[name](), BATCHES[name]
    cell = Cell("w", None, None, strategy, "cpu", 1, 1, "weak", batch, batch, optimizer={"name": "SGD", "lr": 0.001})
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    training = Training(cell, workload, 0, ranks)
    stepper = Stepper(training, workload.datasets()[0], cell, 0, ranks, collate=None, advance=lambda: None)
    bare_loop(stepper, workload, batch, 20)
    pace = bare_loop(stepper, workload, batch, 50) / 50
    steps = max(5, math.ceil(window_s / pace))
    ours, bare = [], []
    for number in range(pairs):
        first_bare = number % 2 == 0  # each goes first as often
        for which in (first_bare, not first_bare):
            if which:
                bare.append(bare_loop(stepper, workload, batch, steps) / steps)
            else:
                ours.append(stepper.window("timed", steps).window.duration_s / steps)
    return [one / other for one, other in zip(ours, bare, strict=True)], statistics.median(bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="pairs of windows for each line")
    parser.add_argument("--window", type=float, default=0.1, help="seconds of a window")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    table = Table(title=f"Harness over a bare loop, {asked.pairs} pairs of windows of {asked.window:g} s")
    for title in ("model", "strategy", "bare step (ms)", "ratio", "95 % interval", f"at most {TARGET}"):
        table.add_column(title)
    rows = []
    for name in WORKLOADS:
        for strategy in ("single", "ddp"):
            ratios, step_s = compare(name, strategy, asked.pairs, asked.window)
            ratio, low, high = median_of(ratios)
            met = "yes" if high <= TARGET else "no"
            table.add_row(name, strategy, f"{1000 * step_s:.2f}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}", met)
            rows.append(
                {
                    "model": name,
                    "strategy": strategy,
                    "step_s": step_s,
                    "ratio": ratio,
                    "low": low,
                    "high": high,
                }
            )
    Console(width=110).print(table)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
