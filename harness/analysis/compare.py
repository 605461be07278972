"""Several runs -> what changed from the first to each later one, and the verdict of --fail-if on each cell."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import get_args

import pandas as pd

from harness.analysis.common import AnyRow, is_no_claim, order
from harness.analysis.history import Metric, read_history, run_columns, side_by_side, started_at
from harness.analysis.results import Results
from harness.analysis.run_pairs import Pair, Question, Side, make_side, match, no_shared_cell, unmatched_cells
from harness.analysis.stats import SIGNIFICANCE, holm, mean_interval
from harness.config.axes import AXES
from harness.config.script import CURVE_METRICS
from harness.errors import ComparisonError
from harness.plan.labels import Labels
from harness.record.frames import records
from harness.record.schema import COMPARISON, GATE, RUNS

METRICS: Mapping[str, Metric] = {name: name for name in get_args(Metric)}
_GRAMMAR = re.compile(r"\s*([a-z_]+)\s*([<>])\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition under which a cell fails: the ratio of ``metric`` is below, or above, the threshold."""

    metric: Metric
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
    return Condition(METRICS[match[1]], match[2] == "<", float(match[3]) / (100 if match[4] else 1))


FAILS, PASSES, UNDECIDED = "fails", "passes", "undecided"
NONE_FAILS, A_CELL_FAILS, NOT_DECIDED = 0, 3, 4
"""Exit codes."""


def gate(pairs: Sequence[Pair], unmatched: Sequence[AnyRow], conditions: Sequence[Condition]) -> pd.DataFrame:
    """Return the verdict of each condition on each cell that both runs measured, and on those that one of them lost.

    A verdict needs a Holm-adjusted p-value of at most 0.05 for the ratio being the threshold: the cell fails if the
    ratio is on the failing side, and passes on the other. A planned cell without a measurement is undecided.
    Rehearsals (see ``is_no_claim``) have no row, since their speed is no claim, nor has the base's speedup.
    """
    rows, p_values = [], []
    for pair, condition in product(pairs, conditions):
        if condition.metric not in pair.gated:
            continue
        ratio = pair.ratios.get(condition.metric)
        p_value = ratio.p_value(condition.threshold) if ratio and not pair.no_claim else None
        row = {**pair.row, "condition": str(condition), "ratio": ratio.ratio if ratio else None, "verdict": UNDECIDED}
        row["reason"] = pair.no_claim or (ratio.reason if ratio else f"no {condition.metric} in both runs")
        if ratio and p_value is not None:
            row |= {"verdict": FAILS if condition.holds(ratio.ratio) else PASSES, "reason": None}
        rows.append(row)
        p_values.append(p_value)
    for row, adjusted in zip(rows, holm(p_values), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted is not None and adjusted > SIGNIFICANCE:
            row |= {"verdict": UNDECIDED, "reason": "the interval, Holm-adjusted, holds the threshold"}
    lost = [row for row in unmatched if row["planned"] and not is_no_claim(row)]
    rows += [{**row, "condition": str(condition), "verdict": UNDECIDED} for row, condition in product(lost, conditions)]
    return GATE.frame(sorted(rows, key=lambda row: (row["run"], order(row))))[GATE.names]


def exit_code(verdicts: pd.DataFrame) -> int:
    """Return 3 if a cell fails, else 4 if one is undecided or there is none, else 0."""
    found = set(verdicts["verdict"])
    return A_CELL_FAILS if FAILS in found else NONE_FAILS if found == {PASSES} else NOT_DECIDED


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SLOWER, FASTER, WITHIN_NOISE = "slower", "faster", "within noise"
TIMES = ("time_to_target_s",)
"""Metrics of convergence that depend on speed: seeds are no replicates of a run's speed."""


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first one; the tables are those of harness/record/schema/compared.py.

    ``conditions``: those of ``--fail-if``, on which ``gate`` has the verdicts. ``unmatched``: the cells that one of two
    runs lacks, see ``unmatched_cells``. ``convergence``: of each cell and metric that two runs trained, the medians and
    the mean difference over the seeds of both, with its t interval from 3 seeds on; times have none. ``environment``:
    see ``side_by_side``. ``history``: the folder that run noise was looked for in; None if it was stated.
    """

    question: Question
    conditions: tuple[Condition, ...]
    runs: pd.DataFrame
    cells: pd.DataFrame
    unmatched: tuple[AnyRow, ...]
    convergence: tuple[AnyRow, ...]
    environment: tuple[AnyRow, ...]
    gate: pd.DataFrame
    history: Path | None

    @cached_property
    def labels(self) -> Labels:
        """The labels of all its cells, which name what differs among them."""
        return Labels([*records(self.cells), *self.unmatched, *self.convergence])

    @property
    def exit_code(self) -> int:
        """3 if a cell fails, else 4 if one is undecided or has no verdict, else 0; 0 without a condition."""
        return exit_code(self.gate) if self.conditions else NONE_FAILS


def compare(runs: Sequence[Results], question: Question, conditions: Sequence[Condition] = ()) -> Comparison:
    """Return the comparison of each later run with the first; raises ComparisonError if that is impossible."""
    _check_runs(runs, question)
    sides = [make_side(letter, results, question) for letter, results in zip(LETTERS, runs, strict=False)]
    first, *others = sides
    for other in others:
        if not (first.cells.keys() & other.cells.keys() or first.trainings.keys() & other.trainings.keys()):
            raise no_shared_cell(first, other)
    folder, earlier = None, {}
    if question.run_noise is None:
        folder = question.history or results_folder(first.results)
        measured = {str(cell.first["cell_id"]) for side in sides for cell in side.cells.values()}
        compared = {side.started_at for side in sides}
        earlier = {start: cells for start, cells in read_history(folder, measured).items() if start not in compared}
    pairs = [pair for other in others for pair in match(first, other, question, earlier)]
    cells = [{**pair.row} for pair in pairs]
    tested = [None if pair.no_claim else pair.ratios["throughput"].p_value() for pair in pairs]
    for row, adjusted in zip(cells, holm(tested), strict=True):
        if adjusted is not None:
            changed = SLOWER if row["ratio"] < 1 else FASTER
            row |= {"p_adjusted": adjusted, "change": changed if adjusted <= SIGNIFICANCE else WITHIN_NOISE}
    unmatched = [row for other in others for row in unmatched_cells(first, other, question)]
    return Comparison(
        question,
        tuple(conditions),
        RUNS.frame(_run(side) for side in sides),
        COMPARISON.frame(sorted(cells, key=lambda row: (row["run"], order(row)))),
        tuple(unmatched),
        tuple(row for other in others for row in _trainings(first, other, question)),
        tuple(side_by_side({side.letter: side.results for side in sides})),
        gate(pairs, unmatched, conditions),
        folder,
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


def _run(side: Side) -> AnyRow:
    results = side.results
    last = results.trials.drop_duplicates("trial_id", keep="last")
    failed = int((~last["outcome"].isin(["ok", "skipped"])).sum())
    return {"run": side.letter, **run_columns(results), "missing": len(results.missing), "failed": failed}


def _trainings(first: Side, later: Side, question: Question) -> list[AnyRow]:
    """Return the rows of the trainings that both runs have, one a cell and metric."""
    cells: dict[str, list[tuple[AnyRow, AnyRow]]] = {}
    for (key, seed), row in first.trainings.items():
        if (key, seed) in later.trainings:
            cells.setdefault(key, []).append((row, later.trainings[key, seed]))
    names = ["train_loss", *(name for name in first.results.convergence if str(name).startswith(CURVE_METRICS)), *TIMES]
    found = [_training(later.letter, pairs, str(name), question) for pairs in cells.values() for name in names]
    return [row for row in found if row]


def _training(letter: str, pairs: Sequence[tuple[AnyRow, AnyRow]], name: str, question: Question) -> AnyRow:
    """Return the row of a cell and metric; an empty one if no seed has a finite value in both runs."""
    known = [(one[name], other.get(name)) for one, other in pairs]
    recorded = [(float(one), float(other)) for one, other in known if one is not None and other is not None]
    values = [both for both in recorded if all(map(math.isfinite, both))]
    if not values:
        return {}
    first, later = pairs[0]
    if name in TIMES and first["target"] != later["target"]:
        return {}
    difference = mean_interval([other - one for one, other in values])
    reasons = dict.fromkeys(str(row["excluded"]) for pair in pairs for row in pair if row["excluded"])
    if len(values) < len(pairs):
        reasons[f"no finite value in {len(pairs) - len(values)} of {len(pairs)} seeds"] = None
    alike = name in TIMES or all(one["epochs"] == other["epochs"] for one, other in pairs)
    if not alike:
        reasons[f"trained for {first['epochs']} and {later['epochs']} epochs"] = None
    return {
        "run": letter,
        **{axis: later.get(axis) for axis in ("cell_id", *AXES)},
        "metric": name,
        "seeds": len(values),
        "by": question.changed(first, later),
        "first": median(one for one, _ in values),
        "later": median(other for _, other in values),
        "difference": difference.value,
        "low": difference.low if alike and name not in TIMES else None,
        "high": difference.high if alike and name not in TIMES else None,
        "reason": "; ".join(reasons) or None,
    }
