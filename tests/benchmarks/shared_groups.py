"""Whether a shared worker group changes its cells: ``python -m tests.benchmarks.shared_groups [FILE] [--pairs 12]``.

One run of the throughput cells of FILE, by default experiments/scaling.yaml, in pairs of blocks. One block of a pair is
as planned: smaller placements run on some ranks of the largest one's worker group. In the other block each placement
has a worker group of its own. Which comes first alternates from pair to pair. The ratio of a cell, shared over alone,
is paired; its interval and its test, adjusted by Holm over the cells, are the product's.

Targets: the interval of all cells pooled lies within 0.98 to 1.02, no cell excludes 1 after Holm, and the peak memory
of each cell, the largest of its ranks, is within 2 %. The default file takes about two minutes a pair on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.analysis.common import measured
from harness.analysis.stats import LEAST_BLOCKS, SIGNIFICANCE, Estimate, geometric_mean, holm, ratio_p_value
from harness.config.load import parse_experiment
from harness.config.yaml_source import read_mapping
from harness.launch.ray import cluster
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, by_placement, make_plan
from harness.record.folder import RunFolder
from harness.report.notebook import load
from harness.run.execution import Execution, launcher_for, start_ray
from tests.benchmarks.figures import UNCHECKED, table_of_numbers, write_figures
from tests.benchmarks.run_time import DEFAULT

WITHIN = 0.02
"""How far from 1 the pooled ratio, and the ratio of a cell's peak memory, may be."""
Ratios = Mapping[str, Sequence[float]]
"""The ratios, shared over alone, of each pair of blocks, by cell."""


def is_shared(block: int) -> bool:
    """Return whether a block is as planned: the first of a pair, then the second of the next."""
    return block % 2 == block // 2 % 2


def plan_of(file: Path, pairs: int, inventory: Inventory) -> Plan:
    """Return the plan of ``pairs`` pairs of blocks. Raises ValueError if no worker group of the file is shared."""
    content, _ = read_mapping(file)
    content.pop("convergence", None)
    content["throughput"] = {**(content.get("throughput") or {}), "blocks": 2 * pairs}
    plan = make_plan(parse_experiment(content | UNCHECKED, source=str(file)), inventory)
    if not any(len([*by_placement(group)]) > 1 for group in plan.groups):
        raise ValueError(f"{file}: each placement has a worker group of its own already; give cells on 1 and 2 devices")
    groups = []
    for group in plan.groups:
        alone = (part for part in by_placement(group) if any(not trial.purpose for trial in part.trials))
        groups += [group] if is_shared(group.block) else alone
    return replace(plan, groups=tuple(groups))


def measure(plan: Plan, folder: Path) -> dict[str, Ratios]:
    """Run the plan; return the ratios of throughput and of peak memory, in the pairs of blocks that have all cells."""
    run = RunFolder.create(folder, plan.experiment, plan, "")
    with ExitStack() as stack:
        ready = stack.enter_context(start_ray(None, plan))
        launcher = launcher_for(plan, ready, folder, stack, lambda event: None)
        Execution(plan, run, launcher, lambda event: None).run()
    trials, found = measured(load(run.path).trials), {}
    for column in ("throughput_per_s", "peak_memory_bytes"):
        by_block = trials.pivot_table(index="label", columns="block", values=column, aggfunc="last", observed=True)
        by_block = by_block.dropna(axis=1)  # a block in which a cell failed
        pairs = [sorted(pair, key=is_shared) for pair in zip(by_block, by_block.columns[1:], strict=False)]
        pairs = [(alone, shared) for alone, shared in pairs if alone // 2 == shared // 2]
        found[column] = {
            str(label): [float(row[shared] / row[alone]) for alone, shared in pairs]
            for label, row in by_block.iterrows()
        }
    return found


def verdict(speeds: Ratios, memory: Ratios) -> tuple[list[tuple[str, ...]], str, bool]:
    """Return the rows of the table, the verdict, and whether a target is missed."""
    adjusted = dict(zip(speeds, holm([ratio_p_value(ratios) for ratios in speeds.values()]), strict=True))
    apart = [cell for cell, p_value in adjusted.items() if p_value is not None and p_value <= SIGNIFICANCE]
    peaks = {cell: geometric_mean(ratios) for cell, ratios in memory.items()}
    most = max(abs(peak.value - 1) for peak in peaks.values())
    pooled = geometric_mean([geometric_mean(pair).value for pair in zip(*speeds.values(), strict=True)])
    rows = []
    for cell, ratios in speeds.items():
        tested = f"{adjusted[cell]:.3f}{' excludes 1' * (cell in apart)}" if len(ratios) >= LEAST_BLOCKS else "-"
        rows.append((cell, str(len(ratios)), _shown(geometric_mean(ratios)), tested, _shown(peaks[cell])))
    missed = {
        f"pooled {_shown(pooled)}": not (pooled.low and 1 - WITHIN <= pooled.low <= (pooled.high or 0) <= 1 + WITHIN),
        f"peak memory within {most:.1%}": most > WITHIN,
        f"cells that exclude 1: {', '.join(apart) or 'none'}": bool(apart),
    }
    return rows, "; ".join(f"{what}: {'MISSED' if no else 'met'}" for what, no in missed.items()), any(missed.values())


def _shown(estimate: Estimate) -> str:
    ends = f" ({estimate.low:.3f} to {estimate.high:.3f})" if estimate.high else ""
    return f"{estimate.value:.3f}{ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--pairs", type=int, default=12, help=f"pairs of blocks; {LEAST_BLOCKS} give intervals")
    parser.add_argument("--json", type=Path, help="write the ratios to this file too")
    asked = parser.parse_args()
    plan = plan_of(asked.file, asked.pairs, cluster.local_inventory())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(plan, Path(folder))
    rows, said, missed = verdict(*found.values())
    headings = ("cell", "pairs", "throughput, shared / alone", "p (Holm)", "peak memory, shared / alone")
    table = table_of_numbers(f"Shared worker groups over those of one placement: {asked.pairs} pairs", headings)
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table, said)
    if asked.json:
        write_figures(asked.json, {key: {cell: [*each] for cell, each in one.items()} for key, one in found.items()})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
