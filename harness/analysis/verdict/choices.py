"""The rule on the choices that a file varies, such as a bucket size: whether one value is faster than another."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.common import Record, is_no_claim, rows_of
from harness.analysis.stats import LEVEL, holm
from harness.analysis.verdict.statement import Statement, Tables
from harness.config.axes import SIZES

NO_CHOICES = frozenset({*SIZES, "strategy"})
"""The axes that the other statements are about; every other axis, and every option, is a choice."""
FASTER, SLOWER, UNCLEAR, TOO_FEW = "faster", "slower", "no clear difference", "too few blocks to say"


def choices(tables: Tables, leading: Sequence[Record]) -> list[Statement]:
    """State of each choice that the file varies whether one value is faster than another, all else equal.

    In the cells of the leading settings; if none of them has the choice, in the fastest pair on the most devices.
    A difference is claimed if the p-value of the paired ratio, adjusted by Holm over these statements, is at most 5 %.
    """
    rows = [row for row in rows_of(tables["versus"]) if row.axis not in NO_CHOICES and _is_claim(row)]
    chosen = {leader.cell_id for leader in leading}
    stated: list[Record] = []
    for axis in dict.fromkeys(str(row.axis) for row in rows):
        mine = [row for row in rows if row.axis == axis]
        stated += [row for row in mine if chosen & {row.cell_id, row.other_id}] or [max(mine, key=_size)]
    adjusted = iter(holm([row.p_value for row in stated if not pd.isna(row.p_value)]))
    return [
        Statement(
            "choice",
            _code(row, None if pd.isna(row.p_value) else next(adjusted)),
            "versus",
            row.cell_id,
            others=(row.other_id,),
            devices=row.devices,
            value=row.ratio,
            low=row.low,
            high=row.high,
            n=row.blocks,
            subject=f"{row.axis} {row.value} / {row.other_value}",
        )
        for row in stated
    ]


def _is_claim(row: Record) -> bool:
    return not (pd.isna(row.ratio) or is_no_claim(vars(row))) and pd.isna(row.excluded)


def _size(row: Record) -> tuple[int, float]:
    return int(row.devices), max(float(row.throughput_per_s), float(row.other_throughput_per_s))


def _code(row: Record, p_value: float | None) -> str:
    if p_value is None:
        return TOO_FEW
    if p_value > 1 - LEVEL:
        return UNCLEAR
    return FASTER if row.ratio > 1 else SLOWER
