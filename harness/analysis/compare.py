"""Several runs -> what changed from the first to each later one, and the verdict of --fail-if on each cell."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd

from harness.analysis.common import Row, Values, axis_value, is_no_claim, matches, order
from harness.analysis.history import History, read_history
from harness.analysis.results import Results
from harness.analysis.run_cells import Fact, git_commit, is_finished, side_by_side, started_at
from harness.analysis.run_pairs import (
    Lost,
    Pair,
    Question,
    Side,
    ambiguous,
    key_of,
    lost_cells,
    make_side,
    match,
    no_shared_cell,
)
from harness.analysis.stats import LEVEL, holm_of_known, mean_interval
from harness.config.axes import AXES
from harness.errors import ComparisonError
from harness.record.frames import records
from harness.record.schema import COMPARISON, GATE, RUNS

METRICS = ("throughput", "speedup")
_GRAMMAR = re.compile(r"\s*([a-z_]+)\s*([<>])\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition under which a cell fails: the ratio of ``metric`` is below, or above, the threshold."""

    metric: Literal["throughput", "speedup"]
    below: bool
    threshold: float

    def __str__(self) -> str:
        return f"{self.metric} {'<' if self.below else '>'} {self.threshold:g}"

    def holds(self, ratio: float) -> bool:
        """Return whether a ratio lies on the failing side."""
        return ratio < self.threshold if self.below else ratio > self.threshold


def parse_condition(text: str) -> Condition:
    """Return the condition of 'throughput < 0.95' or 'speedup < 95 %'; raise ValueError."""
    match = _GRAMMAR.fullmatch(text)
    if not match or match[1] not in METRICS or float(match[3]) == 0:
        raise ValueError(
            f"got {text!r}; allowed: METRIC < NUMBER or METRIC > NUMBER, such as 'throughput < 0.95'; METRIC is "
            f"{' or '.join(METRICS)}, as a ratio of the later run to the first; NUMBER is positive"
        )
    metric: Literal["throughput", "speedup"] = "throughput" if match[1] == "throughput" else "speedup"
    return Condition(metric, match[2] == "<", float(match[3]) / (100 if match[4] else 1))


ALPHA = 1 - LEVEL
FAILS, PASSES, UNDECIDED = "fails", "passes", "undecided"
NONE_FAILS, A_CELL_FAILS, NOT_DECIDED = 0, 3, 4
"""Exit codes."""


def gate(pairs: Sequence[Pair], lost: Sequence[Lost], conditions: Sequence[Condition]) -> pd.DataFrame:
    """Return the verdict of each condition on each cell that both runs measured, and on those that one of them lost.

    A verdict needs a Holm-adjusted p-value of at most 0.05 for the ratio being the threshold: the cell fails if the
    ratio is on the failing side, and passes on the other. A planned cell without a measurement is undecided.
    Rehearsals (see ``is_no_claim``) have no row, since their speed is no claim, nor has the base's speedup.
    """
    found = [
        _verdict(pair, condition)
        for pair, condition in product(pairs, conditions)
        if not (pair.rehearsal or (condition.metric == "speedup" and pair.is_base))
    ]
    rows = [row for row, _ in found]
    for row, adjusted in zip(rows, holm_of_known([p_value for _, p_value in found]), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted is not None and adjusted > ALPHA:
            row |= {"verdict": UNDECIDED, "reason": "the interval, Holm-adjusted, holds the threshold"}
    planned = [each for each in lost if each.planned and not is_no_claim(each.row)]
    rows += [
        {**_axes(each.run, each.row), "condition": str(condition), "verdict": UNDECIDED, "reason": each.reason}
        for each, condition in product(planned, conditions)
    ]
    return GATE.frame(sorted(rows, key=lambda row: (row["run"], order(row))))


def exit_code(verdicts: pd.DataFrame) -> int:
    """Return 3 if a cell fails, else 4 if one is undecided or there is none, else 0."""
    found = set(verdicts["verdict"])
    return A_CELL_FAILS if FAILS in found else NONE_FAILS if found == {PASSES} else NOT_DECIDED


def _verdict(pair: Pair, condition: Condition) -> tuple[Values, float | None]:
    """Return the row of a condition on a cell as if its p-value were small, and the p-value, not adjusted, if any."""
    ratio = pair.throughput if condition.metric == "throughput" else pair.speedup
    row = {**_axes(pair.run, pair.later.first), "condition": str(condition), "ratio": ratio.ratio if ratio else None}
    if pair.no_claim or ratio is None or ratio.noise is None:
        reason = pair.no_claim or (ratio.reason if ratio else f"no {condition.metric} in both runs")
        return {**row, "verdict": UNDECIDED, "reason": reason}, None
    verdict = FAILS if condition.holds(ratio.ratio) else PASSES
    return {**row, "verdict": verdict}, ratio.noise.p_value(ratio.ratio, condition.threshold)


def _axes(run: str, row: Row) -> Values:
    return {"run": run, **{name: row.get(name) for name in ("cell_id", *AXES)}}


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SLOWER, FASTER, WITHIN_NOISE = "slower", "faster", "within noise"
TIMES = ("time_to_target_s",)
"""Metrics of convergence that depend on speed: seeds are no replicates of a run's speed."""


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first one; the tables are those of harness/record/schema/compared.py.

    ``unmatched``: the cells that one of two runs lacks. ``convergence``: of each cell and metric that two runs trained,
    the medians and the mean difference over the seeds of both, with its t interval from 3 seeds on; times have none.
    ``conditions``: those of ``--fail-if``, on which ``gate`` has the verdicts. ``history``: the runs that run noise was
    looked for in; None if it was stated.
    """

    question: Question
    conditions: tuple[Condition, ...]
    runs: pd.DataFrame
    cells: pd.DataFrame
    unmatched: tuple[Lost, ...]
    convergence: tuple[Row, ...]
    environment: tuple[Fact, ...]
    gate: pd.DataFrame
    history: History | None


def compare(runs: Sequence[Results], question: Question, conditions: Sequence[Condition] = ()) -> Comparison:
    """Return the comparison of each later run with the first; raises ComparisonError if that is impossible."""
    _check_runs(runs, question)
    sides = [make_side(letter, results, question) for letter, results in zip(LETTERS, runs, strict=False)]
    first, *others = sides
    for other in others:
        same_trainings = _by_training(first, question).keys() & _by_training(other, question).keys()
        if not (first.cells.keys() & other.cells.keys() or same_trainings):
            raise no_shared_cell(first, other)
    history = None
    if question.run_noise is None:
        measured = {str(cell.first["cell_id"]) for side in sides for cell in side.cells.values()}
        history = read_history(question.history or results_folder(first.results), measured)
    pairs = [pair for other in others for pair in match(first, other, question, history, sides)]
    lost = [each for other in others for each in lost_cells(first, other, question)]
    return Comparison(
        question,
        tuple(conditions),
        RUNS.frame(map(_run, sides)),
        _cells(pairs),
        tuple(lost),
        tuple(row for other in others for row in _trainings(first, other, question)),
        tuple(side_by_side(runs)),
        gate(pairs, lost, conditions),
        history,
    )


def _check_runs(runs: Sequence[Results], question: Question) -> None:
    if not 2 <= len(runs) <= len(LETTERS):
        raise ComparisonError(f"harness compare: got {len(runs)} run; allowed: 2 to {len(LETTERS)} run folders")
    for one, other in combinations(runs, 2):
        start = started_at(one)
        same = one.folder.path.resolve() == other.folder.path.resolve()
        if same or (start is not None and start == started_at(other) and one.lines == other.lines):
            raise ComparisonError(
                f"{one.folder.path} and {other.folder.path} are one and the same run; give two different "
                "runs. Cells of one run are compared in its report"
            )
        if question.by and one.folder.plan().get("measures") != other.folder.plan().get("measures"):
            raise ComparisonError(
                f"{one.folder.path} and {other.folder.path} are of versions of harness that train some cells "
                "otherwise: --by cannot match them; make the first run again with this version"
            )


def results_folder(results: Results) -> Path:
    """Return the results folder that a run is in: results/ of results/<experiment>/<time>-<id>."""
    parent = results.folder.path.resolve().parent
    return parent.parent if parent.name == results.experiment.name else parent


def _run(side: Side) -> Row:
    results = side.results
    last = results.trials.drop_duplicates("trial_id", keep="last")
    return {
        "run": side.letter,
        "folder": str(results.folder.path),
        "experiment": results.experiment.name,
        "started_at": side.started_at,
        "git_commit": git_commit(results),
        "finished": is_finished(results),
        "missing": len(results.missing),
        "failed": int((~last["outcome"].isin(["ok", "skipped"])).sum()),
    }


def _cells(pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return the table of pairs, with p-values adjusted over all of them."""
    rows = [_row(pair) for pair in pairs]
    tested = [None if pair.no_claim else pair.throughput.p_value for pair in pairs]
    for row, pair, adjusted in zip(rows, pairs, holm_of_known(tested), strict=True):
        if adjusted is not None:
            changed = SLOWER if pair.throughput.ratio < 1 else FASTER
            row |= {"p_adjusted": adjusted, "change": changed if adjusted <= ALPHA else WITHIN_NOISE}
    return COMPARISON.frame(sorted(rows, key=lambda row: (row["run"], order(row))))


def _row(pair: Pair) -> dict[str, float | str | tuple[object, ...] | None]:
    first, later, ratio = pair.first, pair.later, pair.throughput
    low, high = (None, None) if pair.no_claim else ratio.ends
    speedups: Values = {}
    if pair.speedup:
        speedups = {"first_speedup": pair.speedup.first, "speedup": pair.speedup.later}
        speedups |= {"speedup_ratio": pair.speedup.ratio, "speedup_noise": pair.speedup.noise_sd}
        speedups |= {"speedup_runs": pair.speedup.noise_runs}
        speedups |= {} if pair.no_claim else dict(zip(("speedup_low", "speedup_high"), pair.speedup.ends, strict=True))
    return {
        "run": pair.run,
        "cell_id": later.first["cell_id"],
        "first_cell_id": first.first["cell_id"],
        **{name: later.first.get(name) for name in (*AXES, "unit")},
        "by": pair.by or None,
        "first_throughput_per_s": ratio.first,
        "throughput_per_s": ratio.later,
        "first_blocks": len(first.throughputs),
        "blocks": len(later.throughputs),
        "ratio": ratio.ratio,
        "low": low,
        "high": high,
        "run_noise": ratio.noise_sd,
        "earlier_runs": ratio.noise_runs,
        "reason": pair.no_claim or ratio.reason or None,
        **speedups,
        "doubts": (*first.doubts("A"), *later.doubts(pair.run)),
    }


Training = tuple[str, int]
"""What trainings must share to be paired: the key of the cell, and the seed."""


def _by_training(side: Side, question: Question) -> dict[Training, Row]:
    found: dict[Training, Row] = {}
    for row in records(side.results.convergence):
        if matches(row, question.only):
            training = (key_of(row, question), int(row["seed"]))
            if training in found:
                raise ambiguous(side.results, question, found[training], row)
            found[training] = row
    return found


def _trainings(first: Side, later: Side, question: Question) -> list[Row]:
    """Return the rows of the trainings that both runs have, one a cell and metric."""
    mine, others = _by_training(first, question), _by_training(later, question)
    cells: dict[str, list[tuple[Row, Row]]] = {}
    for training in mine:
        if training in others:
            cells.setdefault(training[0], []).append((mine[training], others[training]))
    names = ["train_loss", *(name for name in first.results.convergence if str(name).startswith("val_")), *TIMES]
    rows = [_training(later.letter, pairs, str(name), question) for pairs in cells.values() for name in names]
    return [row for row in rows if row["seeds"]]


def _training(letter: str, pairs: Sequence[tuple[Row, Row]], name: str, question: Question) -> Row:
    known = [(one[name], other.get(name)) for one, other in pairs]
    recorded = [(float(one), float(other)) for one, other in known if one is not None and other is not None]
    values = [both for both in recorded if all(map(math.isfinite, both))]
    first, later = pairs[0]
    row = {**_axes(letter, later), "metric": name, "seeds": len(values)}
    if not values:
        return row
    by = ", ".join(f"{axis} {axis_value(first, axis)} -> {axis_value(later, axis)}" for axis in question.by)
    difference = mean_interval([other - one for one, other in values])
    ends = (None, None) if name in TIMES else (difference.low, difference.high)
    reasons = dict.fromkeys(each["excluded"] for pair in pairs for each in pair if each["excluded"])
    if len(values) < len(pairs):
        reasons[f"no finite value in {len(pairs) - len(values)} of {len(pairs)} seeds"] = None
    return {
        **row,
        "by": by or None,
        "first": median(one for one, _ in values),
        "later": median(other for _, other in values),
        "difference": difference.value,
        **dict(zip(("low", "high"), ends, strict=True)),
        "reason": "; ".join(map(str, reasons)) or None,
    }
