"""What the harness's loop adds to a step: ``python -m tests.benchmarks.overhead``.

A bare loop, written by hand as a tutorial would, and the harness's window alternate in one process on the same wrapped
model, optimizer and stream of batches, garbage collection off in both. Paired by window are the ratio of their step
times, each the median of a window's steps, and the ratio of the whole windows, in which the rare slow step counts too.
A process says the median of its ratios: what other work interrupts says nothing of the loop, however long it took.
Where its code and data come to lie in memory is the same for all of its windows, so that processes differ by more than
the windows of one: it is done again in fresh ones. Shown is their geometric mean with its 95 % interval (t on the
logarithms). The upper end for the step time is to be at most 1.01. Takes about twelve minutes.

A small GPT counts tokens, with one micro-batch a step and with four, on one rank and on two: there a bare loop divides
by a number that it knows, and calls DDP's no_sync() itself. Of two ranks, which wait for each other, the CPU time of
both is compared, whose upper end is to be at most 1.03.

With ``--device cuda`` the host runs ahead of the GPU, so that only whole windows, from one synchronisation to the next,
have a time: both ratios are then theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
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
from harness.measure.stepper import Stepper, TrainingData
from harness.measure.window import phases_are_cheap, synchronize
from harness.plan.cell import Cell
from harness.system.process import no_garbage_collection
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import LanguageModel
from tests.benchmarks.figures import measured_apart, write_figures
from tests.worlds import fork_ranks

TARGET, TARGET_OF_TWO = 1.01, 1.03


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
    "small GPT": lambda: LanguageModel(data="synthetic", model="nano", samples=512),
}
BATCHES = {"small ResNet": 32, "small MLP": 64, "small GPT": 16}
"""Samples of a device and a step."""
Loop = Callable[[Stepper, int], tuple[Sequence[float], float]]
"""Takes so many steps; returns the seconds of each, and of the whole."""


@dataclass(frozen=True)
class Case:
    """What is compared. ``parts``: micro-batches a step."""

    model: str
    strategy: str
    ranks: int = 1
    parts: int = 1

    @property
    def target(self) -> float:
        return TARGET_OF_TWO if self.ranks > 1 else TARGET

    @property
    def judged(self) -> str:
        """The ratio that the target is for."""
        return "cpu" if self.ranks > 1 else "step"


def cases_of(models: Sequence[str], ranks: int) -> list[Case]:
    gpt = [name for name in models if name == "small GPT"]
    if ranks > 1:
        return [Case(name, "ddp", ranks, parts) for name in gpt for parts in (1, 4)]
    accumulating = [Case(name, strategy, 1, 4) for name in gpt for strategy in ("single", "ddp")]
    return [*(Case(name, strategy) for name in models for strategy in ("single", "ddp")), *accumulating]


@dataclass(frozen=True)
class Timed:
    """One window, a step: the median of its times, the mean, which is the window's, and the process's CPU time."""

    median_s: float
    mean_s: float
    cpu_s: float


def bare_loop(workload: Any, units: int, parts: int) -> Loop:
    """A loop as one writes it without a harness who wants to know how long each step takes. ``units``: of a step."""

    def run(stepper: Stepper, steps: int) -> tuple[Sequence[float], float]:
        model, optimizer, fetch = stepper.training.model, stepper.training.optimizer, stepper.fetch
        (device,) = stepper.ranks.devices
        on_gpu = device.type == "cuda"
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        with no_garbage_collection():
            synchronize([device])
            times = [time.perf_counter()]
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                for part in range(parts):
                    batch: Any = next(fetch)
                    if on_gpu:
                        batch = [tensor.to(device, non_blocking=True) for tensor in batch]
                    with model.no_sync() if is_ddp and part < parts - 1 else nullcontext():
                        loss, _ = workload.loss(model, batch)
                        (loss / units).backward()
                optimizer.step()
                times.append(time.perf_counter())
            synchronize([device])
            whole_s = time.perf_counter() - times[0]
        return [end - start for start, end in pairwise(times)], whole_s

    return run


def harness_loop(*, detailed: bool) -> Loop:
    """The same in one of the harness's windows."""

    def run(stepper: Stepper, steps: int) -> tuple[Sequence[float], float]:
        window = stepper.window("timed", steps, detailed=detailed)
        return window.step_s, window.duration_s

    return run


def timed(loop: Loop, stepper: Stepper, steps: int) -> Timed:
    """A window of a loop; on a GPU its single steps have no times that both loops can read at the same cost."""
    before = time.process_time()
    step_s, whole_s = loop(stepper, steps)
    cpu_s = stepper.ranks.sum([time.process_time() - before])[0]
    on_cpu = stepper.ranks.devices[0].type == "cpu"
    return Timed(statistics.median(step_s) if on_cpu else whole_s / steps, whole_s / steps, cpu_s / steps)


def compare(case: Case, pairs: int, window_s: float, ranks: Ranks) -> list[tuple[Timed, Timed]]:
    """So many pairs of windows: the harness's, the bare loop's."""
    workload, batch, (device,) = WORKLOADS[case.model](), BATCHES[case.model], ranks.devices
    options: dict[str, Any] = {"optimizer": {"name": "SGD", "lr": 0.001}, "training": {"accumulation": case.parts}}
    size = case.ranks * batch
    cell = Cell("w", None, None, case.strategy, device.type, case.ranks, 1, "weak", batch, size, **options)
    training = Training(cell, workload, 0, ranks)
    stepper = Stepper(training, TrainingData(cell, 0, ranks, *workload.datasets(), workload), lambda: None)
    units = batch * (workload.shape.context if workload.unit == "tokens" else 1)
    bare = bare_loop(workload, units, case.parts)
    timed(bare, stepper, 20)
    pace_s = ranks.broadcast(timed(bare, stepper, 50).mean_s)
    steps = max(5, math.ceil(window_s / pace_s))
    ours = harness_loop(detailed=ranks.broadcast(phases_are_cheap(device, case.parts, pace_s)))
    seen: dict[Loop, list[Timed]] = {ours: [], bare: []}
    for number in range(pairs):
        for loop in sorted(seen, key=lambda loop: (loop is ours) == (number % 2 == 0)):  # each goes first as often
            seen[loop].append(timed(loop, stepper, steps))
    return list(zip(seen[ours], seen[bare], strict=True))


def rows_of(models: Sequence[str], pairs: int, window_s: float, ranks: Ranks) -> list[dict[str, Any]]:
    """A row for each case: the bare step's seconds, and the ratios for a step, for a window and of CPU times."""
    torch.set_num_threads(1)
    rows = []
    for case in cases_of(models, ranks.world_size):
        seen = compare(case, pairs, window_s, ranks)
        row: dict[str, Any] = {**asdict(case), "step_s": statistics.median(bare.median_s for _, bare in seen)}
        row["step"] = statistics.median(ours.median_s / bare.median_s for ours, bare in seen)
        row["window"] = statistics.median(ours.mean_s / bare.mean_s for ours, bare in seen)
        row["cpu"] = statistics.median(ours.cpu_s / bare.cpu_s for ours, bare in seen)
        rows.append(row)
    return rows


def of_rank(models: Sequence[str], pairs: int, window_s: float, rank: int, world_size: int, out: Path) -> None:
    """The rows of several ranks on a CPU, from each of which this is called."""
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    rows = rows_of(models, pairs, window_s, ranks)
    if ranks.first:
        out.write_text(json.dumps(rows))


def one_process(models: Sequence[str], pairs: int, window_s: float, device: torch.device) -> list[dict[str, Any]]:
    """The rows of one rank and, on a CPU, of two, which are processes of their own."""
    found: list[dict[str, Any]] = []
    if device.type == "cpu" and cases_of(models, 2):
        work = partial(of_rank, models, pairs, window_s)
        with tempfile.TemporaryDirectory() as folder:
            found = json.loads(fork_ranks(work, 2, Path(folder), within_s=3600.0).read_text())
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    alone = rows_of(models, pairs, window_s, Ranks(0, 1, 0, 0, "n", "127.0.0.1", (device,)))
    dist.destroy_process_group()
    return [*alone, *found]


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
    headings = (
        "model",
        "strategy",
        "ranks",
        "micro-batches",
        "bare step (ms)",
        "step time",
        "whole window",
        "CPU time",
    )
    table = Table(*headings, "target met", title=title)
    missed = False
    for line in zip(*result, strict=True):
        case = Case(*(line[0][each.name] for each in fields(Case)))
        ratios = {what: geometric_mean([row[what] for row in line]) for what in ("step", "window", "cpu")}
        step_s, high = statistics.median(row["step_s"] for row in line), ratios[case.judged].high
        met = "-" if high is None else "yes" if high <= case.target else "no"
        missed |= met == "no"
        named = (case.model, case.strategy, str(case.ranks), str(case.parts), f"{1000 * step_s:.2f}")
        table.add_row(*named, *map(_shown, ratios.values()), f"{met}: {case.judged} {case.target}")
    Console(width=150).print(table)
    if asked.json:
        write_figures(asked.json, result)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
