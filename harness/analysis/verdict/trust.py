"""The rule on how far the numbers of a run can be trusted, and how many blocks would narrow them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import Row, by_cell, measured
from harness.analysis.ratios import paired
from harness.analysis.stats import stein_blocks
from harness.analysis.verdict.statement import Statement, Tables
from harness.record.frames import records

LOW_NOISE, HIGH_NOISE = 0.15, 0.05
"""How far the interval of the A/A test may reach from 1: beyond the first trust is low, within the second high."""
FEWEST_BLOCKS, GOOD_BLOCKS = 3, 5
HALFWIDTH = 0.05
"""The half-width of intervals that further blocks are counted for."""


def trust(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the trust in the leading cells and their bases: low, medium or high, with the reasons and further blocks.

    ``n``: blocks to add so that the intervals of the leaders' ratios and of the A/A test come within HALFWIDTH, at
    least up to GOOD_BLOCKS: from their spread alone, never from a difference. ``value``: how far the A/A interval
    reaches from 1.
    """
    if not leading:
        return []
    bases = {row["cell_id"]: row["base_id"] for row in records(tables["scaling"])}
    noise = [
        row for row in records(tables["noise"]) if row["cell_id"] in {bases.get(row["cell_id"]) for row in leading}
    ]
    noise = noise or [*records(tables["noise"])]
    reach = max((_reach(row) for row in noise if not pd.isna(row["low"])), default=None)
    blocks = min(int(row["blocks"]) for row in leading)
    low = [*_doubts(tables, leading, bases), *_unknown(tables, leading)]
    if reach is not None and reach > LOW_NOISE:
        low.append("noise")
    if blocks < FEWEST_BLOCKS:
        low.append("blocks")
    if any(row["excludes_one"] for row in noise):
        low.append("differs")
    not_high = [] if reach is not None and reach <= HIGH_NOISE else ["noise" if reach is not None else "no A/A test"]
    not_high += ["blocks"] if blocks < GOOD_BLOCKS else []
    level = "low" if low else "medium" if not_high else "high"
    return [
        Statement(
            "trust",
            level,
            "noise",
            leading[0]["cell_id"],
            value=reach,
            n=0 if level == "high" else _further_blocks(tables, leading, bases, blocks),
            subject="fixed" if tables.fixed_blocks else "rule",
            reasons=tuple(dict.fromkeys(low or not_high)),
        )
    ]


def _reach(row: Row) -> float:
    return max(abs(float(row["low"]) - 1.0), abs(float(row["high"]) - 1.0))


def _doubts(tables: Tables, leading: Sequence[Row], bases: dict[str, str]) -> list[str]:
    """Return the names of the doubts on a leading cell or its base."""
    concerned = {row["cell_id"] for row in leading} | {bases.get(row["cell_id"]) for row in leading}
    rows = [row for row in records(tables["cells"]) if row["cell_id"] in concerned]
    return [f"doubt: {doubt.name}" for row in rows for doubt in row["doubts"]]


def _unknown(tables: Tables, leading: Sequence[Row]) -> list[str]:
    """Return a reason if it is not known whether a leading cell trains as one device does."""
    concerned = {row["cell_id"] for row in leading}
    rows = records(tables["scaling"])
    return ["equivalence"] if any(r["equivalence"] == "unknown" for r in rows if r["cell_id"] in concerned) else []


def _further_blocks(tables: Tables, leading: Sequence[Row], bases: dict[str, str], blocks: int) -> int:
    cells, twins = by_cell(measured(tables["trials"])), by_cell(measured(tables["trials"], "twin"))
    pairs = [(cells.get(row["cell_id"]), cells.get(bases.get(row["cell_id"], ""))) for row in leading]
    pairs += [(twin, cells.get(cell_id)) for cell_id, twin in twins.items()]
    needed = [GOOD_BLOCKS]
    for one, other in pairs:
        if one and other and one is not other:
            speeds, others, _ = paired(one, other, None)
            ratios = [speed / base for speed, base in zip(speeds, others, strict=True)]
            needed += [stein_blocks(ratios, HALFWIDTH)] if len(ratios) > 1 else []
    return max(0, max(needed) - blocks)
