"""How good predictions are, over emulated links: ``python -m tests.benchmarks.prediction [--studies 40] [--seed N]``.

Studies are drawn: the rate of the links, the time of a step, how long its exchange takes beside it, buckets, skew of
the layers, spread of ranks and of steps. Each is measured on 1, 2 and 4 ranks, and on 8 and 16, which are held out. A
third has nodes of several ranks, whose links inside a node are the loopback's; the others have a rank a node. Cells
whose ranks occupied more than MOST_BUSY of the cores are marked, and left out of the judgement before anyone looks at
their errors: there the machine is measured, not the links. Needs root; nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Column, Table

from harness.analysis.prediction.observed import families
from harness.analysis.prediction.predictions import Asked
from harness.analysis.prediction.step_model import slowest_ranks, without_stalls
from harness.analysis.results import Results, load, predict
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.plan.planner import Plan, make_plan
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.run.execution import Execution
from tests.benchmarks.emulated_links import NamespaceLauncher, why_not, world
from tests.benchmarks.figures import SHORT, UNCHECKED

MOST_BUSY = 0.4
HELD_OUT = (8, 16)
MOST_FITTED = 4
"""Ranks of the largest size that is predicted from, and of the largest placement whose links are measured."""
PER_RUN = 5
"""Studies that share the rate of their links, and a run."""
LAYERS, BATCH = 16, 4
RING_OF_8 = 2 * 7 / 8
TARGETS = {8: (0.03, 0.07), 16: (0.05, 0.15)}
"""Mean and largest error at each number of ranks."""
MOST_HALF_WIDTH, MOST_REFUSED = 0.12, 0.1
MOST_EXPOSED_OFF = 5
"""Percentage points of the step."""


@dataclass(frozen=True)
class Study:
    """One drawn cell, with five sizes."""

    tiers: int
    mbit: float
    step_ms: float
    mebibytes: float
    bucket_cap_mb: int
    skew: float
    rank_spread: float
    step_spread: float
    step_correlation: float
    seed: int


def draw_studies(count: int, seed: int) -> list[Study]:
    """Return the studies of a seed, those of a run one after the other; every third run has two tiers."""
    random_ = random.Random(seed)
    studies: list[Study] = []
    for run in range(math.ceil(count / PER_RUN)):
        mbit = round(50 * 10 ** random_.random(), 1)
        for place in range(PER_RUN):
            step_ms = random_.uniform(50, 200)
            covered = place % 3 == 2  # a third, whose exchange computation can cover
            beside = random_.uniform(0.3, 0.6) if covered else random_.uniform(0.7, 2.5)
            mebibytes = max(0.25, beside * step_ms / 1e3 * mbit * 1e6 / 8 / RING_OF_8 / 2**20)
            buckets = random_.randint(2, 4) if covered else random_.randint(1, 4)
            exchange = (round(mebibytes, 2), max(1, round(mebibytes / buckets)), random_.choice([1.0, 8.0]))
            spreads = [round(random_.uniform(0, most), digits) for most, digits in ((0.03, 3), (0.1, 3), (0.8, 2))]
            tiers = 2 if run % 3 == 2 else 1
            studies.append(Study(tiers, mbit, round(step_ms, 1), *exchange, *spreads, random_.randrange(10**6)))
    return studies[:count]


FLAT = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))
TWO_TIERS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (16, 4))
"""Devices and nodes of each size."""


def experiment_of(studies: Sequence[Study], blocks: int, most: int, links_seconds: float) -> Experiment:
    """Return the experiment of studies with one rate, up to so many ranks."""
    names = ("step_ms", "mebibytes", "skew", "rank_spread", "step_spread", "step_correlation", "seed")
    sizes = [size for size in (FLAT if studies[0].tiers == 1 else TWO_TIERS) if size[0] <= most]
    fixed = {"strategy": "ddp", "per_device_batch_size": BATCH, "workload_options.layers": LAYERS}
    cells = [
        {**fixed, "devices": devices, "nodes": nodes, "ddp.bucket_cap_mb": study.bucket_cap_mb}
        | {f"workload_options.{name}": asdict(study)[name] for name in names}
        for study in studies
        for devices, nodes in sizes
    ]
    windows = {"blocks": blocks, "warmup_steps": 3, "windows": 2, "window_steps": 8}
    content = {"name": "prediction", "workload": "emulated_compute", "device": "cpu", "cells": cells, **UNCHECKED}
    content["throughput"] = {**SHORT, **windows, "explain": True, "links_seconds": links_seconds}
    content["optimizer"] = {"name": "SGD", "lr": 0.01}
    return parse_experiment(content, source="prediction")


def measure(
    studies: Sequence[Study], blocks: int, output: Path, *, most: int = 16, links_seconds: float = 20.0
) -> Results:
    """Measure studies with one rate, up to so many ranks; return the results."""
    per_node = 4 if studies[0].tiers == 2 else 1
    experiment = experiment_of(studies, blocks, most, links_seconds)
    with world(most // per_node) as emulated:
        emulated.set_rate(studies[0].mbit)
        plan = without_held_out_links(make_plan(experiment, emulated.inventory(per_node)))
        folder = RunFolder.create(output, experiment, plan, "")
        Execution(plan, folder, NamespaceLauncher(experiment, emulated), lambda event: None).run()
    return load(folder.path)


def without_held_out_links(plan: Plan) -> Plan:
    """Return the plan without measurements of the links of held-out placements, which no prediction may use."""
    groups = []
    for group in plan.groups:
        kept = tuple(t for t in group.trials if t.purpose != "links" or t.cell.devices <= MOST_FITTED)
        groups += [replace(group, trials=kept)] if kept else []
    return replace(plan, groups=tuple(groups))


def exposed_shares(results: Results) -> dict[tuple[str, int, int], float]:
    """Return by family, devices and nodes the share of a step in which it waited for exchanges, as measured.

    The rest of it is the slowest rank's own time, from the ranks' times without exchange and the steps' jitter.
    """
    generator = np.random.default_rng(0)
    shares: dict[tuple[str, int, int], float] = {}
    for family in families(results.trials, results.windows, results.lines, results.step_times):
        jitter = without_stalls(family.jitter)
        for size, seen in family.sizes.items():
            if seen.own_s:
                slowest_s = float(slowest_ranks(np.array(seen.own_s), jitter, generator).mean())
                share = (seen.mean_s - seen.wait_s - slowest_s) / seen.mean_s
                shares[str(family.row["family_id"]), size.devices, size.nodes] = share
    return shares


def judged(results: Results) -> list[dict[str, Any]]:
    """Return the held-out rows, each with the largest share of the cores that its ranks occupied in a block."""
    busy: dict[str, float] = {}
    cells = dict(zip(results.trials["trial_id"], results.trials["cell_id"], strict=True))
    timed = results.ranks[results.ranks["watched_s"].notna()]
    for (trial_id, _), ranks in timed.groupby(["trial_id", "attempt"]):
        used = float(ranks["own_cpu_s"].sum()) / (float(ranks["watched_s"].max()) * (psutil.cpu_count() or 1))
        busy[cells[trial_id]] = max(busy.get(cells[trial_id], 0.0), used)
    trials = records(results.trials)
    by_size = {(row["family_id"], row["devices"]): busy.get(row["cell_id"], math.nan) for row in trials}
    exposed = exposed_shares(results)
    predicted = records(predict(results, Asked(most_fitted=MOST_FITTED)))
    rows = [row for row in predicted if row["devices"] in HELD_OUT and row["kind"] == "held out"]
    for row in rows:
        row["busy"] = by_size.get((row["family_id"], row["devices"]), math.nan)
        row["exposed_share"] = exposed.get((row["family_id"], row["devices"], row["nodes"]))
    return rows


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22(158))."""
    z = 1.96
    centre = (hits + z**2 / 2) / (count + z**2)
    half = z * math.sqrt(hits * (count - hits) / count + z**2 / 4) / (count + z**2)
    return centre - half, centre + half


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return every held-out row."""
    times, shares = ("measured", "predicted", "low", "high"), ("error", "Amdahl", "ring line", "exposed", "predicted")
    columns = (Column(name, justify="right") for name in ("ranks", *times, *shares, "busy", ""))
    table = Table(*columns, title="held out: measured and predicted step, ms")
    for row in rows:
        measured = row["measured_s"]
        seconds = [row[name] for name in ("measured_s", "step_s", "low", "high")]
        laws = [row[f"{law}_s"] / measured - 1 if row.get(f"{law}_s") else None for law in ("amdahl", "ring_line")]
        table.add_row(
            f"{row['devices']} on {row['nodes']}",
            *("" if value is None else f"{1e3 * value:.1f}" for value in seconds),
            *("" if value is None else f"{value:+.1%}" for value in (row["error"], *laws)),
            *("" if share is None else f"{share:.0%}" for share in (row["exposed_share"], predicted_share(row))),
            f"{row['busy']:.2f}",
            (row["refusal"] or "")[:60] or ("left out" if row["busy"] > MOST_BUSY else ""),
        )
    return table


def predicted_share(row: dict[str, Any]) -> float | None:
    """Return the predicted exposed communication over the predicted step; None if there is none."""
    return None if row["step_s"] is None else row["exposed_s"] / row["step_s"]


def judgement(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return errors, coverage and refusals of the cells that count, each beside its target."""
    refused = [row for row in rows if row["step_s"] is None]
    fair = [row for row in rows if row["step_s"] is not None and row["busy"] <= MOST_BUSY]
    lines = [f"{len(rows)} held-out cells: {len(refused)} refused (at most {MOST_REFUSED:.0%}), {len(fair)} judged"]
    for ranks, (mean, worst) in TARGETS.items():
        errors = [abs(row["error"]) for row in fair if row["devices"] == ranks]
        if errors:
            found = f"mean error {fmean(errors):.1%} (target {mean:.0%}), worst {max(errors):.1%} (target {worst:.0%})"
            lines.append(f"{ranks} ranks: {found}, {len(errors)} cells")
        for law in ("amdahl", "ring_line"):
            other = [abs(row[f"{law}_s"] / row["measured_s"] - 1) for row in fair if row["devices"] == ranks]
            if other:
                lines.append(f"    {law}: mean error {fmean(other):.1%}, worst {max(other):.1%}")
    points = [
        100 * abs(share - row["exposed_share"])
        for row in fair
        if (share := predicted_share(row)) is not None and row["exposed_share"] is not None
    ]
    if points:
        most = f"{sum(each <= MOST_EXPOSED_OFF for each in points)} of {len(points)} cells within {MOST_EXPOSED_OFF}"
        lines.append(f"exposed communication: mean {fmean(points):.1f} points off, worst {max(points):.1f}; {most}")
    by_study: dict[str, list[bool]] = {}
    known = [row for row in fair if row["low"] is not None]
    for row in known:
        by_study.setdefault(row["family_id"], []).append(row["low"] <= row["measured_s"] <= row["high"])
    if known:
        hits, cells = sum(map(all, by_study.values())), sum(map(sum, by_study.values()))
        low, high = wilson(hits, len(by_study))
        held = f"{hits} of {len(by_study)} studies ({low:.0%} to {high:.0%}), {cells} of {len(known)} cells"
        lines.append(f"coverage: {held}")
        half = median((row["high"] - row["low"]) / 2 / row["step_s"] for row in known)
        lines.append(f"median half-width {half:.1%} (at most {MOST_HALF_WIDTH:.0%})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=3, help="fewer than 3 have no interval")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--output", type=Path, default=None, help="folder of the runs, which stay there")
    parser.add_argument("--again", type=Path, default=None, help="judge the runs in this folder, and measure nothing")
    options = parser.parse_args()
    if options.again:
        show([row for folder in sorted(options.again.glob("prediction/*")) for row in judged(load(folder))])
        return
    if reason := why_not():
        sys.exit(f"not measured: {reason}")
    output = options.output or Path(tempfile.mkdtemp())
    print(f"seed {options.seed}; runs in {output}", flush=True)
    studies, rows = draw_studies(options.studies, options.seed), []
    for first in range(0, len(studies), PER_RUN):
        chosen = studies[first : first + PER_RUN]
        rows += judged(measure(chosen, options.blocks, output))
        print(f"{first + len(chosen)} of {len(studies)} studies", flush=True)
    show(rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print every held-out row, and the judgement."""
    Console(width=160).print(table_of(rows))
    print(*judgement(rows), sep="\n")


if __name__ == "__main__":
    main()
