"""Cells of a later run matched with those of the first: ratios, run noise, and the cells that one of both lacks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from harness.analysis.common import AnyRow, axis_value, content_key, differing_axes, matches
from harness.analysis.history import EarlierRuns, Metric, RunCell, RunRatio, run_cells, run_ratio, started_at
from harness.analysis.results import Results
from harness.config.axes import AXES, NAMED_AXES
from harness.config.values import PlainValue
from harness.errors import ComparisonError
from harness.record.frames import records

MOST_ALIKE = 40
"""The most cells of a run among which the most alike ones are looked for."""
COLUMNS: Mapping[Metric, tuple[str, ...]] = {
    "throughput": (
        *("first_throughput_per_s", "throughput_per_s"),
        *("ratio", "low", "high", "run_noise", "earlier_runs"),
    ),
    "speedup": (
        *("first_speedup", "speedup"),
        *("speedup_ratio", "speedup_low", "speedup_high", "speedup_noise", "speedup_runs"),
    ),
}
"""The columns of the table comparison on each metric, in the order in which a pair has them."""


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

    def key(self, row: AnyRow) -> str:
        """Return what cells of different runs must share to be matched."""
        return content_key(row, self.by) if self.by else str(row["cell_id"])

    def changed(self, first: AnyRow, later: AnyRow) -> str | None:
        """Return the values of the axes of ``by`` in both runs: 'ddp.bucket_cap_mb 25 -> 1'; None without axes."""
        values = {axis: [axis_value(row, axis) for row in (first, later)] for axis in self.by}
        named = {axis: ["none" if value is None else str(value) for value in both] for axis, both in values.items()}
        return ", ".join(f"{axis} {' -> '.join(both)}" for axis, both in named.items()) or None


@dataclass(frozen=True)
class Side:
    """One of the compared runs, its start as Unix time, and what it measured by what both runs must share.

    ``cells``: by key. ``trainings``: the rows of the table convergence, by key of the cell and seed.
    """

    letter: str
    results: Results
    started_at: float | None
    cells: Mapping[str, RunCell]
    trainings: Mapping[tuple[str, int], AnyRow]


def make_side(letter: str, results: Results, question: Question) -> Side:
    """Return a run with its cells and trainings; raises ComparisonError if --by cannot tell two of them apart."""
    cells = run_cells(results)
    firsts = _by_key(results, question, (cell.first for cell in cells.values()))
    measured = {key: cells[row["cell_id"]] for (key, _), row in firsts.items()}
    trainings = _by_key(results, question, records(results.convergence))
    return Side(letter, results, started_at(results), measured, trainings)


def _by_key(results: Results, question: Question, rows: Iterable[AnyRow]) -> dict[tuple[str, int], AnyRow]:
    """Return the rows of the cells that are asked for, by key and seed."""
    found: dict[tuple[str, int], AnyRow] = {}
    for row in rows:
        if not matches(row, question.only):
            continue
        key = (question.key(row), int(row["seed"]))
        if key in found:
            names = ", ".join(differing_axes(found[key], row))
            raise ComparisonError(
                f"{results.folder.path}: --by {','.join(question.by)}: this run has cells that differ in nothing else "
                f"({names}), so that it is not clear which to compare; choose one of each with --only"
            )
        found[key] = row
    return found


@dataclass(frozen=True)
class Pair:
    """A cell in the first run and in a later one: its row of the table comparison, and what a gate needs besides.

    ``ratios``: by metric; without a speedup for the base, if a run has none or another base, and for a cell that is not
    equivalent in a run. ``no_claim``: the reason that nothing is decided on the cell. ``gated``: the metrics on which a
    condition has a verdict, of a base throughput alone. None of a rehearsal, whose speed is no claim: emulated,
    oversubscribed or faulty in a run, or not equivalent in both.
    """

    row: AnyRow
    ratios: Mapping[Metric, RunRatio]
    no_claim: str
    gated: tuple[Metric, ...]


def match(first: Side, later: Side, question: Question, history: EarlierRuns) -> list[Pair]:
    """Return the pairs of cells of both runs, in the order of the first.

    Only runs before both give the noise: what was measured between them may hold the change that is looked for.
    """
    known = first.started_at is not None and later.started_at is not None
    before = min(first.started_at or 0.0, later.started_at or 0.0) if known else 0.0
    earlier = {start: cells for start, cells in sorted(history.items()) if start < before}
    shared = [(cell, later.cells[key]) for key, cell in first.cells.items() if key in later.cells]
    return [make_pair(later.letter, cell, other, question, earlier) for cell, other in shared]


def make_pair(letter: str, first: RunCell, later: RunCell, question: Question, earlier: EarlierRuns) -> Pair:
    """Return the pair of a cell in the first run and in the later one of this letter."""
    sides = (("A", first), (letter, later))
    rehearsals = [f"{cell.rehearsal} in {name}" for name, cell in sides if cell.rehearsal]
    if first.rehearsal and first.rehearsal == later.rehearsal:
        rehearsals = [first.rehearsal]
    excluded = [f"{name}: {cell.excluded}" for name, cell in sides if cell.excluded]
    no_claim = "; ".join([*rehearsals, *excluded])
    ratios: dict[Metric, RunRatio] = {"throughput": run_ratio(first, later, "throughput", earlier, question.run_noise)}
    if not excluded and first.base and later.base and question.key(first.base) == question.key(later.base):
        ratios["speedup"] = run_ratio(first, later, "speedup", earlier, question.run_noise)
    row: dict[str, object] = {
        "run": letter,
        "cell_id": later.first["cell_id"],
        "first_cell_id": first.first["cell_id"],
        **{name: later.first.get(name) for name in (*AXES, "unit")},
        "by": question.changed(first.first, later.first),
        "first_blocks": len(first.by_block["throughput"]),
        "blocks": len(later.by_block["throughput"]),
        "reason": no_claim or ratios["throughput"].reason or None,
        "doubts": (*first.doubts("A"), *later.doubts(letter)),
    }
    for metric, ratio in ratios.items():
        ends = (None, None) if no_claim else ratio.interval
        deviation = max((sd for sd, _ in ratio.deviations), default=None)
        values = (ratio.first, ratio.later, ratio.ratio, *ends, deviation, ratio.runs)
        row |= dict(zip(COLUMNS[metric], values, strict=True))
    gated: tuple[Metric, ...] = ("throughput",) if first.is_base and later.is_base else ("throughput", "speedup")
    return Pair(row, ratios, no_claim, () if rehearsals or len(excluded) == 2 else gated)


def unmatched_cells(first: Side, later: Side, question: Question) -> list[AnyRow]:
    """Return the cells that one of both runs measured and the other did not, with the other's reason.

    ``planned``: whether the other run planned the cell, or may have.
    """
    found: list[AnyRow] = []
    for side, other in ((first, later), (later, first)):
        trials, missing = other.results.trials, records(other.results.missing)
        rows = records(trials[(trials["kind"] == "throughput") & (trials["outcome"] != "ok")])
        reasons = {question.key(row): f"{other.letter}: {row['outcome']}: {row['reason']}" for row in rows}
        if not question.by:
            reasons |= {str(row["cell_id"]): f"{other.letter}: {row['reason']}" for row in missing}
        rest = f"{other.letter} is unfinished" if question.by and missing else ""
        for key in (key for key in side.cells if key not in other.cells):
            reason = reasons.get(key) or rest
            why = {"planned": bool(reason), "reason": reason or f"no cell of {other.letter}"}
            axes = {name: side.cells[key].first.get(name) for name in ("cell_id", *AXES)}
            found.append({"run": later.letter, "measured_in": side.letter, **why, **axes})
    return found


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
            f"{paths} share no cell: cells of the same settings have other ids, since your code or harness "
            "has changed what they train; make the first run again with this code"
        )
    values = {axis: [json.dumps(axis_value(one, axis), default=str) for one in (row, other)] for axis in axes}
    named = "; ".join(f"{axis}: {' and '.join(both)}" for axis, both in values.items())
    can_be_named = all("." in axis or axis in NAMED_AXES for axis in axes)
    advice = f". To compare cells that differ so: --by {','.join(axes)}" if can_be_named else ""
    return ComparisonError(f"{paths} share no cell; the two most alike differ in {named}{advice}")
