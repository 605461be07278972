"""Equivalence checks -> whether each strategy's update equals that of one device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.common import Values, order
from harness.record.schema import AXES, EQUIVALENCE

MAX_DIFFERENCE = 0.01
"""The largest relative difference of two updates that rounding is given; a wrong share or scale gives 0.1 and more."""

Updates = Mapping[str, npt.NDArray[np.float64]]
"""The change of the parameters, folded into sums, by cell id."""


def equivalence(trials: pd.DataFrame, checks: pd.DataFrame) -> pd.DataFrame:
    """Return each check against that of one device.

    The difference is the norm of the difference of both updates over the norm of one device's. Both
    updates are the sum of the same few steps from the same start on the same global batches, folded alike.
    """
    checked = trials[trials["purpose"] == "equivalence"].drop_duplicates("trial_id", keep="last")
    by_trial = {key: part.sort_values("bucket")["update"] for key, part in checks.groupby(["trial_id", "attempt"])}
    updates = {
        row["cell_id"]: np.asarray(by_trial[row["trial_id"], row["attempt"]], dtype=float)
        for row in checked.to_dict("records")
        if row["outcome"] == "ok" and (row["trial_id"], row["attempt"]) in by_trial
    }
    failed = {row["cell_id"]: f"{row['outcome']}: {row['reason']}" for row in checked.to_dict("records")}
    rows = []
    for row in checked[checked["cell_id"] != checked["base_id"]].to_dict("records"):
        named = {axis: row[axis] for axis in ("cell_id", "base_id", *AXES)}
        rows.append({**named, **_verdict(row["cell_id"], row["base_id"], updates, failed)})
    return EQUIVALENCE.frame(sorted(rows, key=order))


def not_equivalent(equivalence: pd.DataFrame) -> dict[str, str]:
    """Return the reason that a check's cells have no ratios, by the check's cell id; an unknown result is no reason."""
    bad = equivalence[equivalence["equivalent"].eq(False).fillna(False)]
    return {str(row["cell_id"]): str(row["reason"]) for row in bad.to_dict("records")}


def _verdict(
    cell_id: str, base_id: str, updates: Mapping[str, npt.NDArray[np.float64]], failed: Mapping[str, str]
) -> Values:
    for name, which in (("the check", cell_id), ("one device's check", base_id)):
        if which not in updates:
            return {"reason": f"unknown: {name} ended as {failed.get(which, 'nothing: it was not run')}"}
    own, alone = updates[cell_id], updates[base_id]
    norm = float(np.linalg.norm(alone))
    if norm == 0:
        return {"reason": "unknown: one device's parameters did not change"}
    difference = float(np.linalg.norm(own - alone)) / norm
    reason = f"not equivalent to one device: its update differs by {100 * difference:.3g} %"
    equivalent = difference <= MAX_DIFFERENCE
    return {"difference": difference, "equivalent": equivalent, "reason": None if equivalent else reason}
