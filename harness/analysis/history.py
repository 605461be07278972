"""Every run below a folder as one table, and the noise between runs of the same experiment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import pandas as pd

from harness.analysis.common import Row, ends
from harness.analysis.doubts import tally
from harness.analysis.results import Results, load
from harness.analysis.run_cells import (
    Conditions,
    RunCell,
    changes,
    facts_of,
    git_commit,
    is_finished,
    quick_run_cells,
    run_cells,
    started_at,
)
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
    rows: list[Row] = []
    unread: dict[str, str] = {}
    paths = find_run_folders(Path(folder))
    for path in paths:
        try:
            rows.extend(_rows(load(path)))
        except HarnessError as error:
            unread[str(path)] = str(error)
    if not paths:
        raise RunFolderError(f"{folder}: no run folder is below it; give a folder such as results/")
    in_order = sorted(rows, key=lambda row: (row["started_at"] is None, row["started_at"] or 0.0))
    labels = Labels(in_order)
    last: dict[str, Row] = {}  # by cell
    found = []
    for row in in_order:
        before = last.get(row["cell_id"])
        last[row["cell_id"]] = row
        changed = changes(before["facts"], row["facts"]) if before else ()
        found.append({**row, "label": labels.of(row), "changes": changed})
    frame = HISTORY.frame(found)
    frame.attrs[UNREAD] = unread
    return frame.drop(columns="facts", errors="ignore")


def _rows(results: Results) -> Iterator[Row]:
    efficiencies = {row["cell_id"]: row for row in records(results.scaling)}
    of_run = {
        "folder": str(results.folder.path),
        "experiment": results.experiment.name,
        "started_at": started_at(results),
        "git_commit": git_commit(results),
        "finished": is_finished(results),
        "facts": facts_of(results),
    }
    for cell_id, cell in run_cells(results).items():
        scaled, speed = efficiencies.get(cell_id, {}), geometric_mean(cell.throughputs)
        conditions = json.dumps(astuple(cell.conditions)) if cell.conditions else None
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
NOT_RECORDED = "the environment of a run was not recorded"
OTHER_MACHINE = "the runs are of different machines or threads, whose run noise may differ"
Measure = Callable[[RunCell], Sequence[float]]
"""The values of a cell by block: throughputs, or speedups."""


def throughputs(cell: RunCell) -> Sequence[float]:
    """Return the throughputs by block."""
    return cell.throughputs


def speedups(cell: RunCell) -> Sequence[float]:
    """Return the speedups by block."""
    return cell.speedups


@dataclass(frozen=True)
class RunNoise:
    """The standard deviation of a logarithm between runs.

    ``freedom``: its degrees of freedom, and ``runs``: the number of earlier runs; None if it was stated.
    ``within``: the noise that both runs show themselves; a claim needs to hold by that too.
    """

    sd: float
    freedom: int | None = None
    runs: int | None = None
    within: RunNoise | None = None

    def interval(self, ratio: float) -> tuple[float, float]:
        """Return the 95 % confidence interval of the ratio of two runs: t(k - 1) s sqrt(2) on the logarithm."""
        half = max(half_width(each.sd * math.sqrt(2), each.freedom) for each in self.both)
        return ratio * math.exp(-half), ratio * math.exp(half)

    def p_value(self, ratio: float, threshold: float = 1.0) -> float:
        """Return the two-sided p-value of the ratio of two runs being ``threshold``."""
        return max(p_value(math.log(ratio / threshold), each.sd * math.sqrt(2), each.freedom) for each in self.both)

    @property
    def both(self) -> tuple[RunNoise, ...]:
        """This noise, and that within the runs if it is known."""
        return (self, self.within) if self.within else (self,)


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run: its start as Unix time, its folder's name, and its cells by id."""

    started_at: float
    name: str
    cells: Mapping[str, RunCell]


@dataclass(frozen=True)
class History:
    """The runs below a folder; ``unread``: the folders that could not be read, each with the reason."""

    folder: Path
    runs: tuple[EarlierRun, ...]
    unread: Mapping[str, str]

    def before(self, time: float | None, without: Iterable[float | None]) -> list[EarlierRun]:
        """Return the runs that started before ``time``, without those that started at one of the other times.

        A run is known by its start, so that a copy of a run is not another one.
        """
        times = {*without}
        found = {run.started_at: run for run in self.runs if time is not None and run.started_at < time}
        return [run for start, run in sorted(found.items()) if start not in times]


def read_history(folder: Path, cells: Iterable[str]) -> History:
    """Return the runs below a folder that measured one of these cells; a run that cannot be read is left out."""
    wanted = {*cells}
    runs, unread = [], {}
    for path in find_run_folders(folder):
        try:
            results = load(path)
            start = started_at(results)
            if start is not None and any(line["cell_id"] in wanted for line in results.lines):
                runs.append(EarlierRun(start, results.folder.path.name, quick_run_cells(results)))
        except HarnessError as error:
            unread[str(path)] = str(error)
    return History(folder, tuple(runs), unread)


def noise_between(
    first: RunCell, later: RunCell, earlier: Sequence[EarlierRun], measure: Measure
) -> tuple[RunNoise | None, str]:
    """Return the run noise of a cell from earlier runs, or None and the reason.

    s is the standard deviation of the logarithm over k >= 3 runs of the cell before both, in the same environment, each
    over as many blocks as the shorter of both compared runs has. If both runs differ in versions or, compared ``by`` an
    axis, in the cell, s is pooled over the earlier runs of each: it is taken to be the same for both. Cells of the same
    earlier runs share the state of those: together they have no more degrees of freedom than the runs.
    """
    if first.conditions is None or later.conditions is None:
        return None, NOT_RECORDED
    if first.conditions.machine != later.conditions.machine:
        return None, OTHER_MACHINE
    blocks = min(len(measure(first)), len(measure(later)))
    samples: list[dict[float, float]] = []
    for kind in dict.fromkeys(_kind(cell, measure) for cell in (first, later)):
        cells = {run.started_at: run.cells[kind[0]] for run in earlier if kind[0] in run.cells}
        values = {start: measure(cell)[:blocks] for start, cell in cells.items() if _kind(cell, measure) == kind}
        samples.append({start: math.log(geometric_mean(each).value) for start, each in values.items() if each})
    enough = [sample for sample in samples if len(sample) >= LEAST_RUNS]
    if not enough:
        most = max(map(len, samples))
        return (
            None,
            f"{most or 'no'} earlier run{'s' * (most != 1)} of this cell in this environment; {LEAST_RUNS} are needed",
        )
    sd, freedom = pooled_deviation([[*sample.values()] for sample in enough])
    runs = len(set().union(*enough))
    return RunNoise(sd, min(freedom, runs - 1), runs), ""


def noise_within(*runs: Sequence[float]) -> RunNoise | None:
    """Return the noise between the blocks of a run, pooled over the given values of runs; None without two blocks."""
    if max(map(len, runs)) < 2:
        return None
    return RunNoise(*pooled_deviation([[math.log(value) for value in values] for values in runs]))


def _kind(cell: RunCell, measure: Measure) -> tuple[str, Conditions | None, str | None]:
    """Return what runs must share to be replicates: the cell, its conditions and, for speedups, its base."""
    base = cell.base if measure is speedups else None
    return str(cell.first["cell_id"]), cell.conditions, None if base is None else str(base["cell_id"])
