"""Equivalence checks -> whether each strategy's update equals that of one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.common import KEYS, Row, Values, columns_of, order, rows_of, trial_key
from harness.plan.comparison import MAX_DIFFERENCE
from harness.record.schema import DESCRIPTION, EQUIVALENCE

REDUCED_DIFFERENCE = 0.05
"""MAX_DIFFERENCE for steps in bf16 or fp16, and for gradients that are exchanged in 16 bits.

Of updates it bounds the part along one device's update: Adam turns a gradient near 0 into a step of full length, whose
sign the rounding of 16 bits decides. A wrong factor changes that part, a wrong share the gradient too.
"""
ROUNDING = 1e-4
"""A gradient that differs by more differs by what the model does, such as the routing of a mixture of experts: if the
difference is within the bound, an update that differs by at most REDUCED_DIFFERENCE is judged by its part along one
device's, as in 16 bits and for the same reason.
"""
QUANTITIES: Mapping[str, tuple[str, str]] = {
    "gradient": ("gradient_difference", "gradient"),
    "first_update": ("first_difference", "first update"),
    "scaled_update": ("difference", "update"),
}
"""The quantities of a check in the order in which they are judged: the column of each, and its name in a reason."""
Vector = npt.NDArray[np.float64]
Recorded = Mapping[tuple[str, str], Mapping[str, Vector]]
"""The sketches of each cell in each precision, by quantity."""


def equivalence(trials: pd.DataFrame, checks: pd.DataFrame) -> pd.DataFrame:
    """Return each check against the check of one device.

    Both took the same steps from the same start on the same global batches, and are folded alike.
    """
    last = trials.drop_duplicates("trial_id", keep="last")
    records = rows_of(last[last["purpose"] == "equivalence"])
    ok = {trial_key(row): str(row.cell_id) for row in records if row.outcome == "ok"}
    found: dict[tuple[str, str], dict[str, Vector]] = {}
    by_quantity = checks.groupby([*KEYS, "computed_in", "quantity"])
    for (trial_id, attempt, computed_in, name), part in by_quantity:
        if cell_id := ok.get((str(trial_id), int(str(attempt)))):
            sketch = np.asarray(part.sort_values("bucket")["update"], dtype=float)
            found.setdefault((cell_id, str(computed_in)), {})[str(name)] = sketch
    failed = {row.cell_id: (row.outcome, row.reason) for row in records}
    rows = []
    for row in records:
        if row.cell_id == row.base_id:
            continue
        named = columns_of(row, "cell_id", "base_id", *DESCRIPTION)
        recorded = sorted((name for cell_id, name in found if cell_id == row.cell_id), key=lambda name: name != "fp32")
        for computed_in in recorded or dict.fromkeys(("fp32", row.precision)):
            rows.append({**named, "computed_in": computed_in, **_verdict(row, computed_in, found, failed)})
    for row in {row.cell_id: row for row in _of_scripts(last) if row.connected_ranks < row.devices}.values():
        group = f"in groups of {row.connected_ranks}" if row.connected_ranks > 1 else "each alone"
        reason = f"independent copies: its {row.devices} ranks train {group}"
        named = columns_of(row, "cell_id", "base_id", *DESCRIPTION)
        rows.append({**named, "computed_in": row.precision, "equivalent": False, "reason": reason})
    return EQUIVALENCE.frame(sorted(rows, key=order))


def _of_scripts(trials: pd.DataFrame) -> list[Row]:
    """Return the trials of scripts on several ranks."""
    rows = rows_of(trials[trials["connected_ranks"].notna()])
    return [row for row in rows if row.check_id == row.cell_id]


Equivalence = Literal["equivalent", "connected", "unknown", "not equivalent"]
"""connected: of a script, whose ranks are in one process group; what they train is not compared."""
SEVERITY: tuple[Equivalence, ...] = ("equivalent", "connected", "unknown", "not equivalent")


class Verdict(NamedTuple):
    """Whether the cells of a check train as one device does. ``reason``: None if equivalent."""

    equivalence: Equivalence
    reason: str | None = None

    @property
    def excluded(self) -> str | None:
        """The reason if its ratios are no claim."""
        return self.reason if self.equivalence == "not equivalent" else None


OF_CHECK: Mapping[bool | None, Equivalence] = {True: "equivalent", None: "unknown", False: "not equivalent"}
Verdicts = Mapping[str, Verdict]
"""Verdicts by the cell id of the check, which a trial has as check_id."""
NOT_RUN = Verdict("unknown", "unknown: the check has no result")


def verdicts(equivalence: pd.DataFrame, trials: pd.DataFrame) -> dict[str, Verdict]:
    """Return the verdict of each check over all that it compared: the worst, with its reason.

    Of a script's cell, whose check is itself: whether its ranks are connected.
    """
    found = {str(row.cell_id): Verdict("connected") for row in _of_scripts(trials)}  # the worst follows
    for row in rows_of(equivalence):
        own = Verdict(OF_CHECK[row.equivalent], row.reason)
        found[str(row.cell_id)] = _worst([found.get(str(row.cell_id), own), own])
    return found


def verdict_columns(found: Verdicts | None, check_ids: Iterable[str | None]) -> Values:
    """Return the columns ``equivalence`` and ``excluded`` of a ratio of cells with these checks.

    Both are None if no check was planned; ``excluded`` is the reason if a cell is not equivalent, whose ratio is no
    claim. One whose equivalence is unknown keeps its ratio, marked, and may lead, at low trust.
    """
    planned = [str(check_id) for check_id in check_ids if not pd.isna(check_id)]
    if found is None or not planned:
        return {"equivalence": None, "excluded": None}
    worst = _worst([found.get(check_id, NOT_RUN) for check_id in planned])
    return {"equivalence": worst.equivalence, "excluded": worst.excluded}


def _worst(of: Iterable[Verdict]) -> Verdict:
    return max(of, key=lambda verdict: SEVERITY.index(verdict.equivalence))


def _verdict(row: Row, computed_in: str, found: Recorded, failed: Mapping[str, tuple[str, str]]) -> Values:
    """Return the differences of a check in one precision, and the verdict."""
    for name, cell_id in (("the check", row.cell_id), ("one device's check", row.base_id)):
        if (cell_id, computed_in) not in found:
            outcome, why = failed.get(cell_id, ("nothing", "it was not run"))
            return {"reason": f"unknown: {why if outcome == 'skipped' else f'{name} ended as {outcome}: {why}'}"}
    own, alone = found[row.cell_id, computed_in], found[row.base_id, computed_in]
    common = [name for name in QUANTITIES if name in own and name in alone]
    if "scaled_update" not in common:
        return {"reason": "unknown: the update is missing from the check or from that of one device"}
    if not all(alone[name].any() for name in common if name != "gradient"):
        return {"reason": "unknown: one device's parameters did not change"}
    # steps compute in 16 bits, or gradients are exchanged in them
    reduced = computed_in != "fp32" or (row.options or {}).get("ddp.comm_hook", "none") != "none"
    bound = REDUCED_DIFFERENCE if reduced else MAX_DIFFERENCE
    differences = {name: relative(own[name], alone[name]) for name in common}
    if reduced or ROUNDING < differences.get("gradient", 0.0) <= bound:
        most = math.inf if reduced else REDUCED_DIFFERENCE
        updates = [name for name in common if name.endswith("_update") and differences[name] <= most]
        differences |= {name: along(own[name], alone[name]) for name in updates}
    where = "" if computed_in == "fp32" else f" in {computed_in}"
    reasons = [
        f"not equivalent to one device: its {QUANTITIES[name][1]}{where} differs by {100 * value:.3g} %"
        for name, value in differences.items()
        if not value <= bound
    ]
    columns: Values = {QUANTITIES[name][0]: value for name, value in differences.items()}
    return columns | {"bound": bound, "equivalent": not reasons, "reason": reasons[0] if reasons else None}


def relative(own: Vector, alone: Vector) -> float:
    """Return the norm of the difference over the norm of the second; 0 if both are 0."""
    difference, whole = float(np.linalg.norm(own - alone)), float(np.linalg.norm(alone))
    return difference / whole if whole else (np.inf if difference else 0.0)


def along(own: Vector, alone: Vector) -> float:
    """Return how far the first's part along the second, which is not 0, is from the second, relative to it."""
    return abs(1.0 - float(own @ alone) / float(alone @ alone))
