"""Equivalence checks -> whether each strategy's update equals that of one device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.common import Values, order
from harness.record.schema import DESCRIPTION, EQUIVALENCE

MAX_DIFFERENCE = 0.01
"""The largest relative difference of two updates that rounding is given; a wrong share or scale gives 0.1 and more."""

REDUCED_DIFFERENCE = 0.05
"""The same for steps in bf16 or fp16, and for gradients that are exchanged in 16 bits."""


def equivalence(trials: pd.DataFrame, checks: pd.DataFrame) -> pd.DataFrame:
    """Return each check against that of one device.

    The difference is the norm of the difference of both updates over the norm of one device's. Both
    updates are the sum of the same few steps from the same start on the same global batches, folded alike.
    """
    checked = trials[trials["purpose"] == "equivalence"].drop_duplicates("trial_id", keep="last")
    records = checked.to_dict("records")
    ok = {(row["trial_id"], row["attempt"]): str(row["cell_id"]) for row in records if row["outcome"] == "ok"}
    updates: dict[tuple[str, str], npt.NDArray[np.float64]] = {}
    precision = checks["computed_in"].fillna("fp32")
    for (trial_id, attempt, computed_in), part in checks.groupby(["trial_id", "attempt", precision]):
        if cell_id := ok.get((trial_id, attempt)):
            updates[cell_id, str(computed_in)] = np.asarray(part.sort_values("bucket")["update"], dtype=float)
    failed = {row["cell_id"]: f"{row['outcome']}: {row['reason']}" for row in records}
    rows = []
    for row in records:
        if row["cell_id"] == row["base_id"]:
            continue
        named = {axis: row[axis] for axis in ("cell_id", "base_id", *DESCRIPTION)}
        for computed_in in dict.fromkeys(("fp32", row["precision"])):
            verdict = _verdict(row["cell_id"], row["base_id"], computed_in, _bound(row, computed_in), updates, failed)
            rows.append({**named, "computed_in": computed_in, **verdict})
    return EQUIVALENCE.frame(sorted(rows, key=order))


def _bound(row: Mapping[Hashable, Any], computed_in: str) -> float:
    """Return the largest difference that rounding is given."""
    compressed = (row["options"] or {}).get("ddp.comm_hook", "none") != "none"
    return REDUCED_DIFFERENCE if compressed or computed_in != "fp32" else MAX_DIFFERENCE


Equivalence = Literal["equivalent", "unknown", "not equivalent"]
SEVERITY: tuple[Equivalence, ...] = ("equivalent", "unknown", "not equivalent")


class Verdict(NamedTuple):
    """Whether the cells of a check train as one device does. ``reason``: None if equivalent."""

    equivalence: Equivalence
    reason: str | None = None


Verdicts = Mapping[str, Verdict]
"""Verdicts by the cell id of the check, which a trial has as check_id."""
NOT_RUN = Verdict("unknown", "unknown: the check has no result")


def verdicts(equivalence: pd.DataFrame) -> dict[str, Verdict]:
    """Return the verdict of each check over all that it compared: the worst, with its reason."""
    found: dict[str, Verdict] = {}
    for row in equivalence.to_dict("records"):
        equivalent = row["equivalent"]
        name = SEVERITY[1] if pd.isna(equivalent) else SEVERITY[0] if equivalent else SEVERITY[2]
        own = Verdict(name, None if pd.isna(row["reason"]) else str(row["reason"]))
        found[str(row["cell_id"])] = _worst([found.get(str(row["cell_id"]), own), own])
    return found


def verdict_columns(found: Verdicts | None, check_ids: Iterable[str | None]) -> Values:
    """Return the columns ``equivalence`` and ``excluded`` of a ratio of cells with these checks.

    Both are None if no check was planned; ``excluded`` is the reason if a cell is not equivalent, which has no ratio.
    """
    planned = [str(check_id) for check_id in check_ids if not pd.isna(check_id)]
    if found is None or not planned:
        return {"equivalence": None, "excluded": None}
    worst = _worst([found.get(check_id, NOT_RUN) for check_id in planned])
    return {
        "equivalence": worst.equivalence,
        "excluded": worst.reason if worst.equivalence == "not equivalent" else None,
    }


def _worst(of: Iterable[Verdict]) -> Verdict:
    return max(of, key=lambda verdict: SEVERITY.index(verdict.equivalence))


def _verdict(
    cell_id: str,
    base_id: str,
    computed_in: str,
    bound: float,
    updates: Mapping[tuple[str, str], npt.NDArray[np.float64]],
    failed: Mapping[str, str],
) -> Values:
    for name, which in (("the check", cell_id), ("one device's check", base_id)):
        if (which, computed_in) not in updates:
            return {"reason": f"unknown: {name} ended as {failed.get(which, 'nothing: it was not run')}"}
    own, alone = updates[cell_id, computed_in], updates[base_id, computed_in]
    norm = float(np.linalg.norm(alone))
    if norm == 0:
        return {"reason": "unknown: one device's parameters did not change"}
    difference = float(np.linalg.norm(own - alone)) / norm
    where = "" if computed_in == "fp32" else f" in {computed_in}"
    reason = f"not equivalent to one device: its update{where} differs by {100 * difference:.3g} %"
    equivalent = difference <= bound
    return {
        "difference": difference,
        "bound": bound,
        "equivalent": equivalent,
        "reason": None if equivalent else reason,
    }
