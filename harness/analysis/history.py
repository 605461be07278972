"""Every run below a folder as one table, and the noise between runs of the same experiment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.analysis.common import AnyRow, ends
from harness.analysis.doubts import tally
from harness.analysis.results import Results, load
from harness.analysis.run_cells import Conditions, Metric, RunCell, facts_of, run_cells, run_columns, started_at
from harness.analysis.stats import geometric_mean, half_width, p_value, pooled_deviation
from harness.config.axes import AXES
from harness.errors import HarnessError, RunFolderError
from harness.plan.labels import Labels
from harness.record.frames import records
from harness.record.reading import find_run_folders
from harness.record.schema import HISTORY

UNREAD = "unread"
"""The attribute of the table with the folders that could not be read: a mapping of paths to reasons."""


def load_history(folder: str | Path) -> pd.DataFrame:
    """Return one row a run and measured cell, for all runs below a folder, by start; results/README.md has the columns.

    Run folders that cannot be read are left out: ``frame.attrs["unread"]`` maps their paths to the reasons. Raises
    RunFolderError if there is no run.
    """
    in_order: list[tuple[AnyRow, dict[str, str]]] = []
    unread: dict[str, str] = {}
    if not (paths := find_run_folders(Path(folder))):
        raise RunFolderError(f"{folder}: no run folder is below it; give a folder such as results/")
    for path in paths:
        try:
            results = load(path)
            rows, facts = [*_rows(results)], facts_of(results)
            in_order += [(row, facts) for row in rows]
        except HarnessError as error:
            unread[str(path)] = str(error)
    in_order.sort(key=lambda one: math.inf if one[0]["started_at"] is None else one[0]["started_at"])
    labels = Labels(row for row, _ in in_order)
    last: dict[str, dict[str, str]] = {}  # facts by cell
    found = []
    for row, facts in in_order:
        before = last.get(row["cell_id"], facts)
        last[row["cell_id"]] = facts
        changed = [(name, now) for name, now in facts.items() if before.get(name, now) != now]
        changes = tuple(f"{name} {before[name]} -> {now}" for name, now in changed)
        found.append({**row, "label": labels.of(row), "changes": changes})
    frame = HISTORY.frame(found)
    frame.attrs[UNREAD] = unread
    return frame


def _rows(results: Results) -> Iterator[AnyRow]:
    scaling = {row["cell_id"]: row for row in records(results.scaling)}
    of_run = run_columns(results)
    for cell_id, cell in run_cells(results).items():
        scaled, speed = scaling.get(cell_id, {}), geometric_mean(cell.by_block["throughput"])
        conditions = json.dumps(cell.conditions) if cell.conditions else None
        yield {
            **of_run,
            **{name: cell.first.get(name) for name in ("cell_id", "unit", *AXES)},
            "environment": conditions and hashlib.sha256(conditions.encode()).hexdigest()[:8],
            "throughput_per_s": speed.value,
            **ends(speed),
            **{name: scaled.get(name) for name in ("base_id", "speedup", "efficiency")},
            "doubts": (*tally(cell.rows), *filter(None, [cell.excluded])),
        }


LEAST_RUNS = 3
"""The fewest earlier runs that the noise is estimated from."""
EarlierRuns = Mapping[float, Mapping[str, RunCell]]
"""The cells of runs by id, by the run's start as Unix time: a copy of a run is not another one."""
STATED_FOR_THROUGHPUT = "--run-noise is of throughput; the noise of speedups needs earlier runs"
Deviation = tuple[float, int | None]
"""A standard deviation of a logarithm, with its degrees of freedom; None if it was stated."""


@dataclass(frozen=True)
class RunRatio:
    """The geometric means over blocks of a cell in the first and in a later run, with the noise between runs.

    ``deviations``: those of the logarithm between runs; of several, a claim needs to hold by each. Without any, the
    noise is unknown for ``reason``. ``runs``: the number of earlier runs that they are estimated from.
    """

    first: float
    later: float
    deviations: Sequence[Deviation] = ()
    runs: int | None = None
    reason: str = ""

    @property
    def ratio(self) -> float:
        return self.later / self.first

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """The 95 % confidence interval of the ratio: t(k - 1) s sqrt(2) on the logarithm; None if s is unknown."""
        if not self.deviations:
            return None, None
        half = max(half_width(sd * math.sqrt(2), freedom) for sd, freedom in self.deviations)
        return self.ratio * math.exp(-half), self.ratio * math.exp(half)

    def p_value(self, threshold: float = 1.0) -> float | None:
        """Return the two-sided p-value of the ratio being ``threshold``; None if the noise is unknown."""
        difference = math.log(self.ratio / threshold)
        found = (p_value(difference, sd * math.sqrt(2), freedom) for sd, freedom in self.deviations)
        return max(found, default=None)


def read_history(folder: Path, cells: Iterable[str]) -> EarlierRuns:
    """Return the runs below a folder that measured one of these cells; a run that cannot be read is left out."""
    wanted = {*cells}
    runs = {}
    for path in find_run_folders(folder):
        try:
            results = load(path)
            start = started_at(results)
            if start is not None and any(line["cell_id"] in wanted for line in results.lines):
                runs[start] = run_cells(results, quick=True)
        except HarnessError:
            continue
    return runs


def run_ratio(
    first: RunCell, later: RunCell, metric: Metric, earlier: EarlierRuns, stated: float | None = None
) -> RunRatio:
    """Return the ratio of a cell in two runs, with the noise from earlier runs or a stated one of throughput.

    s is the standard deviation of the logarithm over k >= 3 runs of the cell before both, in the same environment, each
    over as many blocks as the shorter of both compared runs has. If both runs differ in versions or, compared ``by`` an
    axis, in the cell, s is pooled over the earlier runs of each: it is taken to be the same for both. Cells of the same
    earlier runs share the state of those: together they have no more degrees of freedom than the runs. Beside a stated
    s stands that between the blocks of both runs.
    """
    one, other = first.by_block[metric], later.by_block[metric]
    ratio = RunRatio(geometric_mean(one).value, geometric_mean(other).value)
    if stated is not None and metric == "throughput":
        return replace(ratio, deviations=[(stated, None), *noise_within(one, other)])
    if stated is not None:
        return replace(ratio, reason=STATED_FOR_THROUGHPUT)
    if first.conditions is None or later.conditions is None:
        return replace(ratio, reason="the environment of a run was not recorded")
    if first.conditions.machine != later.conditions.machine:
        return replace(ratio, reason="the runs are of different machines or threads, whose run noise may differ")
    blocks = min(len(one), len(other))
    samples: list[dict[float, float]] = []
    for kind in dict.fromkeys(_kind(cell, metric) for cell in (first, later)):
        cells = [(start, of_run[kind[0]]) for start, of_run in earlier.items() if kind[0] in of_run]
        values = {start: cell.by_block[metric][:blocks] for start, cell in cells if _kind(cell, metric) == kind}
        samples.append({start: math.log(geometric_mean(each).value) for start, each in values.items() if each})
    enough = [sample for sample in samples if len(sample) >= LEAST_RUNS]
    if not enough:
        most = max(map(len, samples))
        runs = f"{most or 'no'} earlier run{'s' * (most != 1)}"
        return replace(ratio, reason=f"{runs} of this cell in this environment; {LEAST_RUNS} are needed")
    sd, freedom = pooled_deviation([[*sample.values()] for sample in enough])
    count = len(set().union(*enough))
    return replace(ratio, deviations=[(sd, min(freedom, count - 1))], runs=count)


def _kind(cell: RunCell, metric: Metric) -> tuple[str, Conditions | None, str | None]:
    """Return what runs must share to be replicates: the cell, its conditions and, for speedups, its base."""
    base = str(cell.base["cell_id"]) if cell.base and metric == "speedup" else None
    return str(cell.first["cell_id"]), cell.conditions, base


def noise_within(*runs: Sequence[float]) -> list[Deviation]:
    """Return the noise between the blocks of a run, pooled over the given values of runs; none without two blocks."""
    if max(map(len, runs)) < 2:
        return []
    return [pooled_deviation([[math.log(value) for value in values] for values in runs])]
