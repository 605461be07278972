"""How planning, recording, reading and reporting grow: ``python -m tests.benchmarks.growth [--sizes 1000 3000 10000]``.

Each size runs in a process of its own, so that its peak of memory is its own. A trial has 100 steps on 8 ranks.

"Record" hands trials over as fast as the recorder takes them, "one by one" waits until each is on disk; "to disk" is
the part of "record" that waits for the disk; "by hand" writes and syncs the bytes of each alone and does no more.
Nothing is removed before the end: ext4 passes over files that were removed in the last minutes one by one when it makes
new ones, so that a benchmark that follows another too soon makes files at half the speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import write_figures

RANKS, STEPS, BLOCKS = 8, 100, 5
PLANNED_BLOCKS = 3
"""Of the plan of so many cells as there are trials."""
SIZES = (1000, 3000, 10_000)
HALVES = ("record first half", "record second half")
COLUMNS = ("plan", *HALVES, "record", "to disk", "one by one", "by hand", "read", "analyse", "report")
STAGES = ("plan", "record", "read", "analyse", "report")
MOST_S, MOST_GIB, LARGEST = 10.0, 2.0, 10_000
"""What each stage may take at the largest size, and the memory."""


def experiment_of(cells: int, blocks: int) -> dict[str, Any]:
    """A grid of so many cells that can run, on an assumed cluster of 8-GPU nodes, in so many blocks."""
    batches = list(range(1, cells // 4 + 1))
    return {
        "name": "growth",
        "grid": {"strategy": "ddp", "devices": [1, 2, 4], "per_device_batch_size": batches},
        "cells": [{"strategy": "single", "devices": 1, "per_device_batch_size": batches}],
        "throughput": {"blocks": blocks, "twin": False, "explain": False},
        "equivalence": False,
        "preflight": False,
    }


def measure(trials: int, folder: Path) -> dict[str, float]:
    """Seconds of each stage at a size, and the peak of memory in GiB."""
    from harness import files
    from harness.config import parse
    from harness.inventory import Inventory
    from harness.plan import make_plan
    from harness.record import RunFolder
    from harness.recorder import Recorder
    from harness.report import build_report
    from harness.results import load

    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[stage] = time.perf_counter() - start
        return result

    many = experiment_of(trials, PLANNED_BLOCKS)
    timed("plan", lambda: make_plan(parse(many, source="growth"), Inventory.assume(1, 8)))
    experiment = parse(experiment_of(trials // BLOCKS, BLOCKS), source="growth")
    plan = make_plan(experiment, Inventory.assume(1, 8))
    run = RunFolder.create(folder, experiment, plan, "name: growth\n")
    waited = [0.0]
    files.to_disk = _timed_sync(files.to_disk, waited)  # how much of recording is the disk's own
    rest = iter(plan.trials)
    halves = [[next(rest) for _ in range(len(plan.trials) // 2)], list(rest)]
    told = told_by_a_worker_group()  # made before the clock runs: making it is no part of recording
    with Recorder(run) as recorder:
        for name, half in zip(HALVES, halves, strict=True):
            timed(name, lambda half=half: record(recorder, half, told))  # type: ignore[misc]
    seconds["record"] = seconds["record first half"] + seconds["record second half"]
    seconds["to disk"] = waited[0]
    alone = RunFolder.create(folder / "alone", experiment, plan, "name: growth\n")
    timed("one by one", lambda: [list(alone.append_all([as_told(trial, told)])) for trial in plan.trials])
    timed("by hand", lambda: write_by_hand(run, folder / "by hand"))
    results = load(run.path)
    timed("read", lambda: (results.lines, results.steps, results.epochs, results.checks))
    timed("analyse", lambda: [getattr(results, name) for name in ("trials", "cells", "scaling", "waterfall", "ledger")])
    timed("report", lambda: build_report(results))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**seconds, "peak_gib": peak, "trials": float(len(plan.trials)), "cells": float(trials)}


def _timed_sync(to_disk: Callable[[int], None], waited: list[float]) -> Callable[[int], None]:
    def timed(number: int) -> None:
        start = time.perf_counter()
        to_disk(number)
        waited[0] += time.perf_counter() - start

    return timed


def told_by_a_worker_group() -> Any:
    """The result of a trial, but for its id: steps, windows and ranks as a worker group would tell them."""
    import numpy as np

    from harness.messages import TrialResult

    ranks = RANKS
    count = ranks * STEPS
    noise = np.random.default_rng(0)  # numbers that no compression makes small
    steps = {
        "rank": np.repeat(np.arange(ranks), STEPS),
        "window": np.ones(count, dtype=int),
        "step": np.tile(np.arange(STEPS), ranks),
        "warmup": np.zeros(count, dtype=bool),
        "step_s": 0.01 * noise.lognormal(sigma=0.05, size=count),
        "wait_s": 0.001 * noise.lognormal(sigma=0.05, size=count),
        "loss": noise.lognormal(size=count),
    }
    windows = tuple(
        {"rank": rank, "window": 1, "window_kind": "timed", "duration_s": 1.0, "steps": STEPS, "weight": 3200.0}
        for rank in range(ranks)
    )
    return TrialResult(
        "",
        "ok",
        started_at=0.0,
        trial_s=2.0,
        steps_s=1.0,
        unit="samples",
        parameters=1,
        facts={"steady": True},
        parts={"windows": 1.0, "build": 1.0},
        windows=windows,
        steps=steps,
        ranks=tuple({"rank": rank, "node_rank": 0, "host": "a", "threads": 1} for rank in range(ranks)),
    )


def as_told(trial: Any, told: Any) -> Any:
    from harness.trial_record import Record

    facts = {"attempt": 1, "sitting": 0, "group_id": "g", "position": 0}
    return Record(trial, dataclasses.replace(told, trial_id=trial.id), facts)


def record(recorder: Any, trials: list[Any], told: Any) -> None:
    for trial in trials:
        recorder.put(as_told(trial, told))
        recorder.written(0.0)
    recorder.written(None)


def write_by_hand(run: Any, folder: Path) -> None:
    """As many bytes put on disk in the same order, and nothing else: what recording that keeps all cannot go below."""
    parts = sorted((run.path / "raw").glob("*.parquet"))
    lines = (run.path / "trials.jsonl").read_bytes().splitlines(keepends=True)
    part = parts[0].read_bytes()
    folder.mkdir()
    for path, line in zip(parts, lines, strict=True):
        with (folder / "partial").open("wb", buffering=0) as file:
            file.write(part)
            os.fdatasync(file.fileno())
        os.replace(folder / "partial", folder / path.name)
        with (folder / "lines").open("ab", buffering=0) as file:
            file.write(line)
            os.fdatasync(file.fileno())


def verdict(rows: list[dict[str, float]]) -> str:
    """Whether the largest size stays within what is allowed."""
    told = [row for row in rows if row["trials"] >= LARGEST]
    slow = [f"{stage} {row[stage]:.1f} s" for row in told for stage in STAGES if row[stage] > MOST_S]
    large = [f"{row['peak_gib']:.2f} GiB" for row in told if row["peak_gib"] > MOST_GIB]
    if not told:
        return ""
    return f"At {LARGEST:,} within {MOST_S:g} s and {MOST_GIB:g} GiB: {', '.join(slow + large) or 'all'}" + (
        " MISSED" if slow or large else " met"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        sys.stdout.write(json.dumps(measure(int(asked.one[0]), Path(asked.one[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in asked.sizes:
            one = ["--one", str(size), tempfile.mkdtemp(dir=folder)]
            command = [sys.executable, "-m", "tests.benchmarks.growth", *one]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout))
    table = Table(title=f"Seconds by size: trials of {STEPS} steps on {RANKS} ranks; {platform.processor() or 'CPU'}")
    for title in ("trials (cells planned)", *COLUMNS, "peak GiB"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row['trials']:,.0f} ({row['cells']:,.0f})", *(f"{row[c]:.2f}" for c in COLUMNS), f"{row['peak_gib']:.2f}"
        )
    table.caption = verdict(rows)
    Console(width=140).print(table)
    if asked.json:
        write_figures(asked.json, rows)


if __name__ == "__main__":
    main()
