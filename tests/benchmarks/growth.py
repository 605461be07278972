"""How planning, recording, reading and reporting grow: ``python -m tests.benchmarks.growth [--sizes 1000 3000 10000]``.

Each size runs in a process of its own, so that its peak of memory is its own, and all of them in every round: what is
told is the median of the rounds, between the least and the most of them, and sizes are compared inside a round, so that
a machine that is slower for a minute does not look like growth. A trial has 100 steps on 8 ranks, and what explains it;
twins, checks and examinations are among the trials, as they are by default. ``--plain`` leaves all of these out.

"Record" writes one trial after the other, each on disk before the next; "to disk" is the part of it that waits for the
disk; "by hand" writes and syncs the same bytes and does no more.
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
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import UNCHECKED, measured_apart, table_of_numbers, write_figures

RANKS, STEPS, BLOCKS = 8, 100, 5
WINDOWS = ("timed", "alone", "together", "alone", "together")
PLANNED_BLOCKS = 3
"""Of the plan of so many cells as there are trials."""
SIZES, ROUNDS = (1000, 3000, 10_000), 3
HALVES = ("record first half", "record second half")
COLUMNS = ("plan", *HALVES, "record", "to disk", "by hand", "read", "analyse", "report")
STAGES = ("plan", "record", "read", "analyse", "report")
MOST_S, MOST_GIB, LARGEST = 30.0, 2.0, 10_000
"""What each stage may take at the largest size, and the memory."""
SLOWER, LEAST_JUDGED = 1.3, 1000
"""How much longer a trial may take after others than before them, and from which size on that is judged."""


def experiment_of(cells: int, blocks: int, plain: bool) -> dict[str, Any]:
    """A grid of so many cells that can run, on an assumed cluster of 8-GPU nodes, in so many blocks."""
    batches = {"per_device_batch_size": list(range(1, cells // 4 + 1))}
    grid = {"strategy": "ddp", "devices": [1, 2, 4], **batches}
    bases = {"cells": [{"strategy": "single", "devices": 1, **batches}]}
    throughput = {"blocks": blocks, "twin": not plain, "explain": not plain}
    return {"name": "growth", "grid": grid, **bases, "throughput": throughput, **(UNCHECKED if plain else {})}


def measure(trials: int, folder: Path, plain: bool = False) -> dict[str, float]:
    """Seconds of each stage at a size, and the peak of memory in GiB."""
    from harness.analysis.results import TABLES, load
    from harness.config.load import parse_experiment
    from harness.plan.inventory import Inventory
    from harness.plan.planner import make_plan
    from harness.record.folder import RunFolder
    from harness.report.html import build_report
    from harness.system import files

    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[stage] = time.perf_counter() - start
        return result

    many = experiment_of(trials, PLANNED_BLOCKS, plain)
    timed("plan", lambda: make_plan(parse_experiment(many, source="growth"), Inventory.assume(1, 8)))
    cells = trials // BLOCKS if plain else 4 * trials // (5 * BLOCKS)  # every fourth is a base, which has a twin
    experiment = parse_experiment(experiment_of(cells, BLOCKS, plain), source="growth")
    plan = make_plan(experiment, Inventory.assume(1, 8))
    run = RunFolder.create(folder, experiment, plan, "name: growth\n")
    waited = [0.0]
    files.to_disk = _timed_sync(files.to_disk, waited)  # how much of recording is the disk's own
    middle = len(plan.trials) // 2
    halves = (plan.trials[:middle], plan.trials[middle:])
    reported = results_by_purpose(plain)  # made before the clock runs: making it is no part of recording
    for name, half in zip(HALVES, halves, strict=True):
        timed(name, lambda half=half: [record(run, trial, reported) for trial in half])  # type: ignore[misc]
    seconds["record"] = seconds["record first half"] + seconds["record second half"]
    seconds["to disk"] = waited[0]
    timed("by hand", lambda: write_by_hand(run, folder / "by hand"))
    results = load(run.path)
    timed("read", lambda: (results.lines, results.steps, results.epochs, results.checks))
    timed("analyse", lambda: [getattr(results, name) for name in TABLES])
    timed("report", lambda: build_report(results))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**seconds, "peak_gib": peak, "trials": float(len(plan.trials)), "cells": float(trials)}


def _timed_sync(to_disk: Callable[[int], None], waited: list[float]) -> Callable[[int], None]:
    def timed(number: int) -> None:
        start = time.perf_counter()
        to_disk(number)
        waited[0] += time.perf_counter() - start

    return timed


def results_by_purpose(plain: bool = False) -> dict[str, Any]:
    """What a trial of each purpose comes to, but for its id, as a worker group would tell it."""
    import numpy as np

    from harness.plan.trial import TrialResult

    ranks, count = RANKS, RANKS * STEPS
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
    parts = {f"{phase}_s": 0.15 for phase in ("wait", "copy", "forward", "backward", "optimizer", "rest")}
    windows = [
        {"rank": rank, "window": number, "window_kind": kind, "duration_s": seconds, "steps": STEPS, **parts}
        for rank in range(ranks)
        for number, (kind, seconds) in enumerate(zip(WINDOWS, noise.uniform(1.0, 1.1, len(WINDOWS)), strict=True))
    ]
    held = dict.fromkeys(("peak_memory_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"), 10**6)
    place = {"node_rank": 0, "node_id": "n", "address": "127.0.0.1", "host": "a", "devices": "cpu"}
    rows = tuple({"rank": rank, "local_rank": rank, **place, "threads": 1, **held} for rank in range(ranks))
    took: dict[str, Any] = {"started_at": 0.0, "trial_s": 2.0, "steps_s": 1.0, "parts": {"windows": 1.0, "build": 1.0}}
    bare = TrialResult("", "ok", **took, unit="samples", parameters=1, ranks=rows)
    facts = {"steady": True, "flops_per_unit": 1e6, "flops_reason": "", "measured_peak_flops_per_s": 1e12}
    timed = dataclasses.replace(bare, facts=facts, steps=steps)
    reported = tuple({"weight": 3200.0, **window} for window in windows)
    alone = tuple(window for window in reported if window["window_kind"] == "timed")
    found = {"links": bare, "profile": bare, "doctor": dataclasses.replace(bare, facts={"findings": []})}
    found["equivalence"] = dataclasses.replace(bare, checks={"bucket": list(range(64)), "update": [1.0] * 64})
    of_purpose = {"": alone if plain else reported, "explain": reported, "twin": alone}
    return found | {name: dataclasses.replace(timed, windows=windows) for name, windows in of_purpose.items()}


def record(run: Any, trial: Any, reported: dict[str, Any]) -> None:
    circumstances = {"attempt": 1, "invocation": 0, "group_id": "g", "position": 0}
    run.append(trial, dataclasses.replace(reported[trial.purpose], trial_id=trial.id), circumstances)


def write_by_hand(run: Any, folder: Path) -> None:
    """As many bytes put on disk in the same order, and nothing else: what recording that keeps all cannot go below."""
    parts = sorted((run.path / "raw").glob("*.parquet"))
    lines = (run.path / "trials.jsonl").read_bytes().splitlines(keepends=True)
    by_rank = next((run.path / "raw").glob("*-ranks.json")).read_bytes()
    part = parts[0].read_bytes()
    folder.mkdir()
    for path, line in zip(parts, lines, strict=False):  # examinations have no steps
        for name, content in ((path.name, part), (f"{path.stem}-ranks.json", by_rank)):
            with (folder / "partial").open("wb", buffering=0) as file:
                file.write(content)
                os.fdatasync(file.fileno())
            os.replace(folder / "partial", folder / name)
        with (folder / "lines").open("ab", buffering=0) as file:
            file.write(line)
            os.fdatasync(file.fileno())


Rows = list[dict[str, float]]
"""What one round measured: a row a size, smallest first."""


def over(rounds: list[Rows], choose: Callable[[list[float]], float]) -> Rows:
    """Of each size's figures the median, the least or the most over the rounds."""
    sizes = zip(*rounds, strict=True)
    return [{name: choose([row[name] for row in rows]) for name in rows[0]} for rows in sizes]


def verdict(rounds: list[Rows]) -> tuple[str, bool]:
    """Whether all grows linearly, and the largest size stays within what is allowed; and whether anything misses."""
    missed, reported = [], []
    for row in over(rounds, median):
        if row["trials"] >= LARGEST:
            missed += [f"{stage} {row[stage]:.1f} s" for stage in STAGES if row[stage] > MOST_S]
            missed += [f"{row['peak_gib']:.2f} GiB"] if row["peak_gib"] > MOST_GIB else []
            reported = [f"At {LARGEST:,} within {MOST_S:g} s and {MOST_GIB:g} GiB"]
    for row in over([growth(rows) for rows in rounds], median):
        size = f"{row.pop('trials'):,.0f}"
        halves = row.pop("halves")
        if halves > SLOWER:
            missed.append(f"the second half of recording {size} took {halves:.2f} of the first")
        missed += [f"{stage} to {size}: {ratio:.2f} a trial" for stage, ratio in row.items() if ratio > SLOWER]
    reported.append(f"linear (from {LEAST_JUDGED:,} trials on, at most {SLOWER:g} a trial)")
    return f"{' and '.join(reported)}: {'; '.join(missed) + ' MISSED' if missed else 'met'}", bool(missed)


def growth(rows: Rows) -> Rows:
    """How many times longer a trial takes in each stage than at the size before, and after others than before them."""
    rows = [row for row in rows if row["trials"] >= LEAST_JUDGED]
    reported = [{"trials": row["trials"], "halves": row[HALVES[1]] / row[HALVES[0]]} for row in rows]
    for (one, next_one), ratios in zip(pairwise(rows), reported[1:], strict=True):
        more = next_one["trials"] / one["trials"]
        ratios.update({stage: next_one[stage] / one[stage] / more for stage in STAGES})
    return reported


def table_of(rounds: list[Rows]) -> Table:
    """Of each size the median over the rounds, and under it the least and the most."""
    title = f"Seconds by size: trials of {STEPS} steps on {RANKS} ranks; {platform.processor() or 'CPU'}"
    title += f"; median of {len(rounds)} rounds" if len(rounds) > 1 else ""
    table = table_of_numbers(title, ("trials (cells planned)", *COLUMNS, "peak GiB"))
    named = {"": median, "least": min, "most": max} if len(rounds) > 1 else {"": median}
    chosen = [over(rounds, choose) for choose in named.values()]  # type: ignore[arg-type]
    for size in zip(*chosen, strict=True):
        for name, row in zip(named, size, strict=True):
            head = name or f"{row['trials']:,.0f} ({row['cells']:,.0f})"
            table.add_row(head, *(f"{row[column]:.2f}" for column in (*COLUMNS, "peak_gib")))
        table.add_section()
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--plain", action="store_true", help="without twins, checks and what explains trials")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        sys.stdout.write(json.dumps(measure(int(asked.one[0]), Path(asked.one[1]), asked.plain)))
        return 0
    sizes, plain = sorted(asked.sizes), ["--plain"] if asked.plain else []
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            [measured_apart("growth", "--one", str(size), tempfile.mkdtemp(dir=folder), *plain) for size in sizes]
            for _ in range(asked.rounds)
        ]
    table = table_of(rounds)
    table.caption, missed = verdict(rounds)
    Console(width=140).print(table)
    if asked.json:
        write_figures(asked.json, [{"round": number, **row} for number, rows in enumerate(rounds) for row in rows])
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
