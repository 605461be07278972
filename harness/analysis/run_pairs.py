"""Cells of a later run matched with those of the first: ratios, run noise, and the cells that one of both lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from harness.analysis.common import Row, axis_value, content_key, differing_axes, matches
from harness.analysis.history import (
    EarlierRun,
    History,
    Measure,
    RunNoise,
    noise_between,
    noise_within,
    speedups,
    throughputs,
)
from harness.analysis.results import Results
from harness.analysis.run_cells import RunCell, run_cells, started_at
from harness.analysis.stats import geometric_mean
from harness.config.axes import NAMED_AXES
from harness.config.values import PlainValue
from harness.errors import ComparisonError
from harness.record.frames import records

MOST_ALIKE = 40
"""The most cells of a run among which the most alike ones are looked for."""
STATED_FOR_THROUGHPUT = "--run-noise is of throughput; the noise of speedups needs earlier runs"


@dataclass(frozen=True)
class Question:
    """What is asked of several runs.

    ``by``: axes and options in which matched cells may differ. ``only``: a part of the cells. ``run_noise``: a stated
    standard deviation of throughput between runs, as a share. ``history``: the folder of earlier runs; None for the
    results folder of the first run.
    """

    by: tuple[str, ...] = ()
    only: Mapping[str, PlainValue] = field(default_factory=dict)
    run_noise: float | None = None
    history: Path | None = None


@dataclass(frozen=True)
class Side:
    """One of the compared runs: its letter, its measured cells by what they must share to be matched."""

    letter: str
    results: Results
    cells: Mapping[str, RunCell]

    @property
    def started_at(self) -> float | None:
        return started_at(self.results)


@dataclass(frozen=True)
class RunRatio:
    """The ratio of a later run's value to the first run's, with the run noise or the reason for its absence."""

    first: float
    later: float
    noise: RunNoise | None
    reason: str

    @property
    def ratio(self) -> float:
        return self.later / self.first

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """The ends of the 95 % confidence interval; None without run noise."""
        return self.noise.interval(self.ratio) if self.noise else (None, None)

    @property
    def p_value(self) -> float | None:
        """The p-value of no change; None without run noise."""
        return self.noise.p_value(self.ratio) if self.noise else None

    @property
    def noise_sd(self) -> float | None:
        return max(each.sd for each in self.noise.both) if self.noise else None

    @property
    def noise_runs(self) -> int | None:
        return self.noise.runs if self.noise else None


@dataclass(frozen=True)
class Pair:
    """A cell of the first run and its counterpart in a later run, whose letter is ``run``.

    ``speedup``: None for the base, and if a run has none, or another base. ``no_claim``: the reason that nothing is
    decided on the cell.
    """

    run: str
    first: RunCell
    later: RunCell
    by: str
    throughput: RunRatio
    speedup: RunRatio | None
    no_claim: str

    @property
    def rehearsal(self) -> bool:
        """Whether the cell's speed is no claim: emulated, oversubscribed or faulty in a run, not equivalent in both."""
        return bool(self.first.rehearsal or self.later.rehearsal or (self.first.excluded and self.later.excluded))

    @property
    def is_base(self) -> bool:
        """Whether the cell is the base of its run, or stands in for it: its speedup is 1."""
        return self.first.is_base and self.later.is_base


@dataclass(frozen=True)
class Lost:
    """A cell that one of two runs measured, and the reason that the other did not; ``planned``: it has, or may have."""

    run: str
    measured_in: str
    row: Row
    planned: bool
    reason: str


def make_side(letter: str, results: Results, question: Question) -> Side:
    """Return a run with its cells; raises ComparisonError if two of them differ in nothing but the axes of --by."""
    cells: dict[str, RunCell] = {}
    for cell in run_cells(results).values():
        if not matches(cell.first, question.only):
            continue
        key = key_of(cell.first, question)
        if key in cells:
            raise ambiguous(results, question, cells[key].first, cell.first)
        cells[key] = cell
    return Side(letter, results, cells)


def ambiguous(results: Results, question: Question, row: Row, other: Row) -> ComparisonError:
    """Return the error of two cells of a run that differ in nothing but the axes of --by."""
    names = ", ".join(differing_axes(row, other))
    return ComparisonError(
        f"{results.folder.path}: --by {','.join(question.by)}: this run has cells that differ in nothing else "
        f"({names}), so that it is not clear which to compare; choose one of each with --only"
    )


def match(first: Side, later: Side, question: Question, history: History | None, without: Sequence[Side]) -> list[Pair]:
    """Return the pairs of cells of both runs, in the order of the first; ``without``: runs that are no earlier runs."""
    earlier: list[EarlierRun] = []
    if history and first.started_at is not None and later.started_at is not None:
        # earlier than both: what was measured between them may hold the change that is looked for
        compared = [side.started_at for side in without]
        earlier = history.before(min(first.started_at, later.started_at), compared)
    shared = [(cell, later.cells[key]) for key, cell in first.cells.items() if key in later.cells]
    return [_pair(later.letter, cell, other, question, earlier) for cell, other in shared]


def _pair(letter: str, first: RunCell, later: RunCell, question: Question, earlier: Sequence[EarlierRun]) -> Pair:
    stated = None
    if question.run_noise is not None:
        stated = RunNoise(question.run_noise, within=noise_within(first.throughputs, later.throughputs))
    throughput = _ratio(first, later, earlier, throughputs, stated)
    speedup = None
    if first.base and later.base and key_of(first.base, question) == key_of(later.base, question):
        speedup = _ratio(first, later, earlier, speedups, None)
        if stated and not speedup.noise:
            speedup = RunRatio(speedup.first, speedup.later, None, STATED_FOR_THROUGHPUT)
    sides = (("A", first), (letter, later))
    rehearsals = [f"{cell.rehearsal} in {name}" for name, cell in sides if cell.rehearsal]
    if first.rehearsal == later.rehearsal and first.rehearsal:
        rehearsals = [first.rehearsal]
    excluded = [f"{name}: {cell.excluded}" for name, cell in sides if cell.excluded]
    return Pair(
        letter,
        first,
        later,
        ", ".join(f"{name} {_named(first, name)} -> {_named(later, name)}" for name in question.by),
        throughput,
        None if excluded else speedup,
        "; ".join([*rehearsals, *excluded]),
    )


def _ratio(
    first: RunCell, later: RunCell, earlier: Sequence[EarlierRun], measure: Measure, stated: RunNoise | None
) -> RunRatio:
    noise, reason = (stated, "") if stated else noise_between(first, later, earlier, measure)
    return RunRatio(geometric_mean(measure(first)).value, geometric_mean(measure(later)).value, noise, reason)


def _named(cell: RunCell, axis: str) -> str:
    value = axis_value(cell.first, axis)
    return "none" if value is None else str(value)


def lost_cells(first: Side, later: Side, question: Question) -> list[Lost]:
    """Return the cells that one of both runs measured and the other did not, with the other's reason."""
    found = []
    for side, other in ((first, later), (later, first)):
        reasons = _reasons(other, question)
        rest = f"{other.letter} is unfinished" if question.by and not other.results.missing.empty else ""
        for key, cell in side.cells.items():
            if key not in other.cells:
                reason = reasons.get(key) or rest
                found.append(
                    Lost(later.letter, side.letter, cell.first, bool(reason), reason or f"no cell of {other.letter}")
                )
    return found


def _reasons(side: Side, question: Question) -> dict[str, str]:
    """Return why a run has no measurement of a planned cell, by the cell's key."""
    trials = side.results.trials
    rows = records(trials[(trials["kind"] == "throughput") & (trials["outcome"] != "ok")])
    reasons = {key_of(row, question): f"{side.letter}: {row['outcome']}: {row['reason']}" for row in rows}
    if not question.by:
        missing = records(side.results.missing)
        reasons |= {str(row["cell_id"]): f"{side.letter}: {row['reason']}" for row in missing}
    return reasons


def key_of(row: Row, question: Question) -> str:
    """Return what cells of different runs must share to be matched."""
    return content_key(row, question.by) if question.by else str(row["cell_id"])


def no_shared_cell(first: Side, later: Side) -> ComparisonError:
    """Return the error of two runs without a matched cell, with the axes in which the two most alike cells differ."""
    paths = f"{first.results.folder.path} and {later.results.folder.path}"
    mine, others = ([cell.first for cell in side.cells.values()][:MOST_ALIKE] for side in (first, later))
    if not mine or not others:
        empty = [side.letter for side in (first, later) if not side.cells]
        lacking = f"{' and '.join(empty)} {'has' if len(empty) == 1 else 'have'} none"
        return ComparisonError(f"{paths} share no measured cell: {lacking}; give other runs, or a wider --only")
    row, other = min(product(mine, others), key=lambda pair: len(differing_axes(*pair)))
    axes = differing_axes(row, other)
    if not axes:
        return ComparisonError(
            f"{paths} share no cell: cells of the same settings have other ids, since versions of harness train them "
            "otherwise; make the first run again with this version"
        )
    values = {axis: [json.dumps(axis_value(one, axis), default=str) for one in (row, other)] for axis in axes}
    named = "; ".join(f"{axis}: {' and '.join(both)}" for axis, both in values.items())
    can_be_named = all("." in axis or axis in NAMED_AXES for axis in axes)
    advice = f". To compare cells that differ so: --by {','.join(axes)}" if can_be_named else ""
    return ComparisonError(f"{paths} share no cell; the two most alike differ in {named}{advice}")
