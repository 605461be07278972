"""What ``--improve`` tried: each setting against the cell that it is to improve, and whether the last is confirmed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.analysis.common import Row, Values, axis_value, by_cell, columns_of, differing_axes, measured, rows_of
from harness.analysis.equivalence import Verdicts
from harness.analysis.ratios import AXES, Paired, paired, ratio_row
from harness.config.values import PlainValue

STEPS = ("screening", "combination", "confirmation")
"""The steps of an improvement, each with a run folder of its own, in their order."""
SCREENING, COMBINATION, CONFIRMATION = STEPS
SCREENING_BLOCKS, CONFIRMING_BLOCKS = 2, 5
"""The fewest blocks of screening and combination, and of a confirmation, each in fresh processes."""
HELPS = 1.01
"""The ratio from which on a change is tried further."""


def step_rows(
    improved_id: str, step: str, trials: pd.DataFrame, checked: Verdicts, wall_s: float, *, finished: bool
) -> list[Values]:
    """Return a row of the table IMPROVEMENTS for each setting of a step, the fastest first, those that failed last.

    ``trials``: those of the step's run; ``checked``: the verdicts on them. ``finished``: whether no limit or
    interruption has left out trials. Without settings that were not measured, or in no block with the cell to improve,
    for lack of time.
    """
    timed = rows_of(trials[trials["kind"] == "throughput"].drop_duplicates("cell_id", keep="last"))
    improved = next((row for row in timed if row.cell_id == improved_id), None)
    if improved is None:
        return []
    cells = by_cell(rows_of(measured(trials)))
    places, speeds = ("strategy", "devices", "nodes"), ("throughput_per_s", "improved_throughput_per_s")
    found: list[Values] = []
    for row in timed:
        if row is improved or columns_of(row, *places) != columns_of(improved, *places):  # such as their bases
            continue
        group = cells.get(row.cell_id, [])
        pair = paired(group, cells.get(improved_id, []))
        ratio = ratio_row(pair, speeds, checked, group) if pair else columns_of(row, *AXES)
        reason = _reason(row, pair, confirms=step == CONFIRMATION and finished)
        if reason or ratio.get("ratio"):
            named: Values = {"improved_id": improved_id, "step": step, "wall_s": wall_s}
            found.append({**ratio, **named, "changes": changes_text(changes_of(improved, row)), "reason": reason})
    found.sort(key=lambda row: -float(row.get("ratio") or 0))
    for at, ratio in enumerate(found):
        ratio["kept"] = is_kept(step, ratio, first=at == 0)
    return found


def _reason(row: Row, pair: Paired, *, confirms: bool) -> str | None:
    """Return why a setting has no ratio, or is not confirmed; None if it has one, or its trial was not made."""
    if pair.apart:
        return pair.apart
    blocks = len(pair.pairs)
    if confirms and blocks < CONFIRMING_BLOCKS:  # no further call measures more
        return f"measured in {blocks} of {CONFIRMING_BLOCKS} blocks, its other trials failed"
    return None if pair or row.outcome in ("ok", "skipped") else str(row.reason)


def is_kept(step: str, row: Mapping[str, Any], *, first: bool) -> bool:
    """Return whether a setting goes on from a step, or is confirmed; ``first``: whether it is the step's fastest."""
    if not row.get("ratio") or row.get("excluded"):
        return False
    if step == CONFIRMATION:
        return bool(row["blocks"] >= CONFIRMING_BLOCKS and row["low"] > 1)
    return bool(row["ratio"] >= HELPS and (first or step == SCREENING))


def changes_of(improved: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, PlainValue]:
    """Return the values of a setting by axis or option that differ from the values of the cell to improve."""
    return {axis: axis_value(row, axis) for axis in differing_axes(improved, row)}


def changes_text(changes: Mapping[str, PlainValue]) -> str:
    """Return changes as they stand in an experiment file: 'loader.workers: 2, ddp.bucket_cap_mb: 1'."""
    values = {axis: value if isinstance(value, str) else json.dumps(value) for axis, value in changes.items()}
    return ", ".join(f"{axis}: {value}" for axis, value in values.items())
