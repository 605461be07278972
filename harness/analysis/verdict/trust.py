"""The rule on how far the numbers of a run can be trusted, and how many blocks decide what is open."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import Row, by_cell, rows_of
from harness.analysis.doubts import doubt_of
from harness.analysis.ratios import PAIR_COLUMNS, Paired, paired, with_twins, within
from harness.analysis.stats import CLEAR, EQUAL_WITHIN, LEAST_BLOCKS, SIGNIFICANCE, deciding_blocks, holm, word
from harness.analysis.verdict import Statement, Tables
from harness.config.axes import SIZES

NO_CHOICES = frozenset({*SIZES, "strategy"})
"""The axes that the other statements are about; every other axis, and every option, is a choice."""
GOOD_BLOCKS = 5
HALFWIDTH = EQUAL_WITHIN
"""The half-width of an interval within which two settings are about equal: no further blocks are asked for."""


def trust(tables: Tables, leading: Sequence[Row]) -> list[Statement]:
    """State the trust in the leading cells and their bases: low, medium or high, with the reasons and further blocks.

    One statement for the leading cells with the same level for the same reasons; ``others``: all of them but the first.
    ``n``: blocks to add to decide what is open: the ratios to the base, to settings that cannot be told apart and to
    the other value of a choice, by their spread and mean so far; at least up to GOOD_BLOCKS. Blocks are added to the
    whole run, so that only the statement that needs most has them.
    """
    bases = {row.cell_id: row.base_id for row in rows_of(tables["scaling"])}
    pairs = [(row.cell_id, row.other_id) for row in rows_of(tables["versus"]) if row.axis not in NO_CHOICES]
    pairs += [(row.cell_id, row.leader_id) for row in rows_of(tables["leaders"]) if row.tied is not False]
    cells = by_cell(rows_of(with_twins(tables["trials"])[[*PAIR_COLUMNS]]))
    alike: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
    for leader in leading:
        own, base_id = leader.cell_id, bases.get(leader.cell_id)
        compared = [(own, base_id), *(pair for pair in pairs if own in pair)]
        rows = [(cells.get(one), cells.get(other or "")) for one, other in compared if one != other]
        found = [pair for first, second in rows if first and second and (pair := paired(first, second)).ratios]
        further = _further_blocks(tables, found, int(leader.blocks))
        alike.setdefault(_level(tables, leader, base_id, found), {})[own] = further
    needed = {level: max(further.values()) for level, further in alike.items()}
    most = max(needed, key=lambda level: needed[level], default=None)
    statements, subject = list[Statement](), "fixed" if tables.look else "rule"
    for (level, reasons), (first, *others) in alike.items():
        n = needed[level, reasons] if (level, reasons) == most else 0
        statements.append(Statement("trust", level, "noise", first, (*others,), n=n, subject=subject, reasons=reasons))
    return statements


def _level(tables: Tables, leader: Row, base_id: str | None, pairs: Sequence[Paired]) -> tuple[str, tuple[str, ...]]:
    """Return the level of trust in a leading cell, and the reasons why it is no higher."""
    noise = rows_of(tables["noise"])
    twins = zip(noise, holm([None if pd.isna(row.p_value) else row.p_value for row in noise]), strict=True)
    tests = [p_value for row, p_value in twins if row.cell_id == base_id and p_value is not None]
    doubted = [row for row in rows_of(tables["cells"]) if row.cell_id in (leader.cell_id, base_id)]
    counted = [doubt for row in doubted for doubt in row.doubts]
    low = [f"doubt: {doubt.name}" for doubt in counted if doubt.repeats and not doubt_of(doubt.name).widens]
    own = [row for row in rows_of(tables["scaling"]) if row.cell_id == leader.cell_id]
    if leader.cell_id != base_id and any(row.equivalence in (None, "unknown") for row in own):
        low.append("equivalence")
    low += ["differs"] if any(p_value <= SIGNIFICANCE for p_value in tests) else []
    if pairs and (found := pairs[0].disagreement):  # of the ratio to the base
        low.append(f"invocations: {found[0]:.2f}, then {found[1]:.2f}")
    low += ["blocks"] if leader.blocks < LEAST_BLOCKS else []
    not_high = ["script"] if any(row.equivalence == "connected" for row in own) else []
    not_high += ([] if tests else ["no A/A test"]) + (["blocks"] if leader.blocks < GOOD_BLOCKS else [])
    return "low" if low else "medium" if not_high else "high", tuple(dict.fromkeys(low or not_high))


def _further_blocks(tables: Tables, pairs: Sequence[Paired], blocks: int) -> int:
    """Return how many more blocks decide those of the comparisons that are open; 0 if none is."""
    needed = [
        deciding_blocks(pair.ratios, HALFWIDTH, tables.next_significance)
        for pair in pairs
        if len(pair.ratios) > 1
        and word(pair.p_value, tables.significance) != CLEAR
        and not within(pair.ratio, HALFWIDTH)
    ]
    return max(0, max([GOOD_BLOCKS, *needed]) - blocks) if needed or blocks < LEAST_BLOCKS else 0
