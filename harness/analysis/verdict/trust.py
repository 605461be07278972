"""The rule on how far the numbers of a run can be trusted, and how many blocks would narrow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from harness.analysis.common import Record, Records, by_cell, measured, rows_of
from harness.analysis.ratios import PAIR_COLUMNS, paired
from harness.analysis.stats import LEAST_BLOCKS, stein_blocks
from harness.analysis.verdict import Statement, Tables
from harness.config.axes import SIZES
from harness.config.strategy_traits import BASE_STRATEGY

NO_CHOICES = frozenset({*SIZES, "strategy"})
"""The axes that the other statements are about; every other axis, and every option, is a choice."""
LOW_NOISE, HIGH_NOISE = 0.15, 0.05
"""How far the interval of the A/A test may reach from 1: beyond the first trust is low, within the second high."""
GOOD_BLOCKS = 5
HALFWIDTH = 0.05
"""The half-width of intervals that further blocks are counted for."""


class Rates(NamedTuple):
    """The successful timed trials of each cell, and of the twin of each base; the cells that differ in a choice."""

    cells: Mapping[str, Records]
    twins: Mapping[str, Records]
    choices: Sequence[tuple[str, str]]


def trust(tables: Tables, leading: Sequence[Record]) -> list[Statement]:
    """State the trust in the leading cells and their bases: low, medium or high, with the reasons and further blocks.

    One statement for the leading cells with the same level for the same reasons; ``others``: all of them but the first.
    ``n``: blocks to add so that the intervals of their ratios, to the base and to the other value of a choice, and of
    the A/A tests come within HALFWIDTH; of a cell without a ratio, that of its throughput. At least up to GOOD_BLOCKS:
    from their spread alone, never from a difference. Blocks are added to the whole run, so that only the statement
    that needs most has them. ``value``: how far the intervals of the A/A tests reach from 1.
    """
    bases = {row.cell_id: row.base_id for row in rows_of(tables["scaling"])}
    pairs = [(row.cell_id, row.other_id) for row in rows_of(tables["versus"]) if row.axis not in NO_CHOICES]
    trials = tables["trials"]
    cells, twins = (by_cell(rows_of(measured(trials, purpose)[[*PAIR_COLUMNS]])) for purpose in ("", "twin"))
    rates = Rates(cells, twins, pairs)
    alike: dict[tuple[str, tuple[str, ...]], list[Statement]] = {}
    for leader in leading:
        statement = _trust(tables, leader, bases.get(leader.cell_id), rates)
        alike.setdefault((statement.code, statement.reasons), []).append(statement)
    found = []
    for statements in alike.values():
        reaches = [one.value for one in statements if one.value is not None]
        found.append(
            replace(
                statements[0],
                others=tuple(str(one.cell_id) for one in statements[1:]),
                value=max(reaches, default=None),
                n=max(one.n or 0 for one in statements),
            )
        )
    most = max(found, key=lambda statement: statement.n or 0, default=None)
    return [statement if statement is most else replace(statement, n=0) for statement in found]


def _trust(tables: Tables, leader: Record, base_id: str | None, rates: Rates) -> Statement:
    noise = [row for row in rows_of(tables["noise"]) if row.cell_id == base_id]
    ends = [float(end) for row in noise if not pd.isna(row.low) for end in (row.low, row.high)]
    reach = max((abs(end - 1.0) for end in ends), default=None)
    blocks = int(leader.blocks)
    doubted = [row for row in rows_of(tables["cells"]) if row.cell_id in (leader.cell_id, base_id)]
    low = [f"doubt: {doubt.name}" for row in doubted for doubt in row.doubts]
    own = [row for row in rows_of(tables["scaling"]) if row.cell_id == leader.cell_id]
    if leader.strategy != BASE_STRATEGY and any(row.equivalence in (None, "unknown") for row in own):
        low.append("equivalence")
    if reach is not None and reach > LOW_NOISE:
        low.append("noise")
    if blocks < LEAST_BLOCKS:
        low.append("blocks")
    not_high = [] if reach is not None and reach <= HIGH_NOISE else ["noise" if reach is not None else "no A/A test"]
    not_high += ["blocks"] if blocks < GOOD_BLOCKS else []
    not_high += ["differs"] if any(row.excludes_one for row in noise) else []
    level = "low" if low else "medium" if not_high else "high"
    return Statement(
        "trust",
        level,
        "noise",
        leader.cell_id,
        value=reach,
        n=0 if level == "high" else _further_blocks(leader, base_id, rates, blocks),
        subject="fixed" if tables.fixed_blocks else "rule",
        reasons=tuple(dict.fromkeys(low or not_high)),
    )


def _further_blocks(leader: Record, base_id: str | None, rates: Rates, blocks: int) -> int:
    cells, base, own = rates.cells, rates.cells.get(base_id or ""), leader.cell_id
    pairs = [(cells.get(own), base), (rates.twins.get(base_id or ""), base)]
    pairs += [(cells.get(one), cells.get(other)) for one, other in rates.choices if own in (one, other)]
    spreads = [paired(first, second).ratios for first, second in pairs if first and second and first is not second]
    # the table's interval of a cell that is compared with none is that of its throughput
    spreads = spreads or [list({row.block: float(row.throughput_per_s) for row in cells.get(own, ())}.values())]
    needed = [stein_blocks(values, HALFWIDTH) for values in spreads if len(values) > 1]
    return max(0, max([GOOD_BLOCKS, *needed]) - blocks)
