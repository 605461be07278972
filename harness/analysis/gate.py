"""The verdict of each condition of ``harness compare --fail-if`` on each cell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd

from harness.analysis.common import Row, Values, is_no_claim, order
from harness.analysis.condition import Condition
from harness.analysis.run_pairs import Lost, Pair
from harness.analysis.stats import LEVEL, holm
from harness.record.schema import AXES, GATE

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
    rows: list[Values] = []
    tested: list[tuple[Values, float]] = []
    for pair, condition in product(pairs, conditions):
        if not (pair.rehearsal or (condition.metric == "speedup" and pair.is_base)):
            row, p_value = _verdict(pair, condition)
            rows.append(row)
            tested += [(row, p_value)] if p_value is not None else []
    for (row, _), adjusted in zip(tested, holm([p_value for _, p_value in tested]), strict=True):
        row["p_adjusted"] = adjusted
        if adjusted > ALPHA:
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
