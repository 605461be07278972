"""The rule on why a step is not shorter: what takes the time of a leading cell's step, in one list by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.analysis.common import Row
from harness.analysis.verdict.statement import Statement, Tables
from harness.record.frames import records

DATA = "waiting for data"
"""The part of the step that has two measurements: against one device in the waterfall, as a whole in the phases."""
WAITS = 0.10
"""The share of a step spent waiting for data from which all of it is a cause, whatever the number of devices."""
WORTH_NAMING = 0.01
"""The least share of a step that is named, lost or saved."""
CLEAR, UNCLEAR, NO_INTERVAL, SAVED = "clear", "unclear", "no interval", "saved"
WHOLE_WAIT = "figure-phases"
"""The evidence of a wait for data that includes what one device waits."""


def causes(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the parts that take time of each leading cell's step, the largest first, and those that save some last.

    The parts of its waterfall, what is not explained among them. The wait for data is that of the phases from WAITS,
    since the waterfall has only what it takes more than on one device. ``code``: SAVED for a part that is shorter than
    on one device, which the others add up with to what is lost; else whether the interval excludes 0.
    """
    parts: dict[str, list[Row]] = {}
    for row in records(tables["waterfall"]):
        if row["part"] != "ideal":
            parts.setdefault(row["cell_id"], []).append(row)
    phases = {row["cell_id"]: row for row in records(tables["phases"])}
    found: list[Statement] = []
    for leader in leading:
        cell_id = leader["cell_id"]
        of_cell = [*_causes(cell_id, parts.get(cell_id, []), phases.get(cell_id))]
        if any((one.value or 0.0) > 0 for one in of_cell):
            found += sorted(of_cell, key=lambda one: -(one.value or 0.0))
    return found


def _causes(cell_id: str, parts: Sequence[Row], phases: Row | None) -> Iterator[Statement]:
    waits = phases is not None and not pd.isna(phases["waits"]) and phases["waits"] >= WAITS
    if phases is not None and waits:
        ends = {"low": phases["waits_low"], "high": phases["waits_high"]}
        yield _cause(cell_id, DATA, WHOLE_WAIT, {**phases, **ends, "share": phases["waits"]})
    for row in parts:
        if abs(row["share"]) >= WORTH_NAMING and not (waits and row["part"] == DATA):
            yield _cause(cell_id, row["part"], "figure-waterfall", row)


def _cause(cell_id: str, part: str, evidence: str, row: Row) -> Statement:
    code: str = UNCLEAR
    if pd.isna(row["low"]):
        code = NO_INTERVAL if row["share"] > 0 else SAVED
    elif row["low"] > 0 or row["high"] < 0:
        code = CLEAR if row["low"] > 0 else SAVED
    return Statement(
        "loss",
        code,
        evidence,
        cell_id,
        devices=row["devices"],
        value=row["share"],
        low=row["low"],
        high=row["high"],
        n=row["blocks"],
        subject=part,
        reasons=(row["reason"],) if part == "rest" and row["reason"] else (),
    )
