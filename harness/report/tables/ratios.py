"""Text tables of paired ratios: A/A test, Ray to torchrun, any axis, the fastest settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from harness.analysis.common import is_no_claim
from harness.analysis.improvements import CONFIRMATION
from harness.analysis.ratios import ALL_THREADS
from harness.analysis.verdict.rules import NO_CHOICES
from harness.plan.labels import SEPARATOR, joined
from harness.report.row import (
    Row,
    cell_label,
    is_missing,
    is_not_equivalent,
    is_true,
    rate_unit,
    rows_of,
    setting_without,
    why_excluded,
)
from harness.report.tables.scaling import marked
from harness.report.tables.text import (
    CELL,
    Column,
    TextTable,
    decimal,
    estimate,
    flush_right,
    make_table,
    or_dash,
    speed,
    words,
)

LARGE = 10.0
"""The ratio from which on three digits are written."""


@or_dash
def ratio(value: float) -> str:
    """Return a ratio with three decimals, a large one with three digits."""
    return speed(value) if value >= LARGE else f"{value:.3f}"


def noise_table(noise: pd.DataFrame) -> TextTable:
    """Return each base against its twin."""
    names: list[Column] = [("setting", "setting", words)]
    speeds = {"base": "throughput_per_s", "twin": "twin_throughput_per_s"}
    return _ratio_table(noise, names, speeds, "twin / base")


def parity_table(parity: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell under Ray against the same cell under torchrun; ``narrow``: see versus_table."""
    names: list[Column] = [("cell", cell_label, words), ("setting", _beside_launchers, words)]
    speeds = {} if narrow else {"torchrun": "control_throughput_per_s", "Ray": "throughput_per_s"}
    return _ratio_table(parity, names, speeds, "Ray / torchrun")


def versus_table(versus: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell against another that differs in one axis; ``narrow``, for a terminal: without throughputs."""
    names: list[Column] = [("first / second", pair_label, words), ("setting", pair_setting, words)]
    speeds = {} if narrow else {"second": "other_throughput_per_s", "first": "throughput_per_s"}
    return _ratio_table(versus, names, speeds, "ratio")


def improvements_table(improvements: pd.DataFrame) -> TextTable:
    """Return each setting that was tried against the cell to improve; one that failed with the reason.

    Only a confirmation has an interval: what was screened was chosen among many, in processes that were not fresh.
    """
    names: list[Column] = [("step", "step", words), ("changes", "changes", words)]
    after: list[Column] = [("went on, or is confirmed", lambda row: "yes" if is_true(row.kept) else "no", words)]
    after.append(("reason", "reason", words))
    speeds = {"before": "improved_throughput_per_s", "with it": "throughput_per_s"}
    return _ratio_table(improvements, names, speeds, "ratio", after, lambda row: row.step == CONFIRMATION)


def _ratio_table(
    frame: pd.DataFrame,
    names: list[Column],
    speeds: dict[str, str],
    title: str,
    after: Sequence[Column] = (),
    claims: Callable[[Row], bool] = lambda row: True,
) -> TextTable:
    """Return what names each pair, its throughputs by heading, its ratio, the number of blocks, and what follows.

    ``claims``: whether a row's ratio has an interval.
    """
    unit = rate_unit(frame)

    def text(row: Row) -> str:
        if is_missing(row.ratio):
            return why_excluded(row)
        return marked(estimate(ratio, row, "ratio") if claims(row) else ratio(row.ratio), row)

    def kind(row: Row) -> str:
        if is_no_claim(row) or is_not_equivalent(row):
            return "apart"
        return "base" if claims(row) and is_true(row.excludes_one) else ""

    columns = (
        *names,
        *((f"{name} ({unit})", column, speed) for name, column in speeds.items()),
        (f"{title} (95 % interval)", text, flush_right, "ratio"),
        ("n", "blocks", flush_right),
        *after,
    )
    return make_table(columns, rows_of(frame), kind)


def pair_label(row: Row) -> str:
    """Return 'ddp x2 / dp (emulated) x2', or 'ddp x2 · bucket_cap_mb=25 / 1': the parts in which both labels differ."""
    placed, first, second, _ = _compared(row)
    key = "batch " if first.startswith("batch ") else first.partition("=")[0] + "="
    second = second.removeprefix(key) if SEPARATOR not in first + second else second
    return joined(placed, f"{first or 'unset'} / {second or 'unset'}")


def pair_setting(row: Row) -> str:
    """Return what the two cells of a pair share and others do not, besides strategy and devices."""
    return _compared(row)[3]


def parity_label(row: Row) -> str:
    """Return the label of a cell that was measured under both launchers."""
    return joined(cell_label(row), _beside_launchers(row))


def _compared(row: Row) -> tuple[str, str, str, str]:
    """Return strategy and devices if both cells share them, what each label has alone, and what else they share."""
    one, other = (words(row[name]).split(SEPARATOR) for name in ("label", "other_label"))
    placed = one[0] if one[0] == other[0] else ""
    first, second = ([part for part in a if part not in b] for a, b in ((one, other), (other, one)))
    return placed, joined(*first), joined(*second), joined(*(part for part in one[1:] if part in other))


def _beside_launchers(row: Row) -> str:
    """Return the setting without the launcher, since both are compared."""
    return setting_without(row, row.launcher)


def main_axes(versus: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons that the file is about: of options and other choices, else of strategies, else of batches.

    A file that varies a choice, such as a bucket size or a precision, asks about it; strategies stand in most files.
    """
    versus = versus[versus["axis"] != ALL_THREADS]
    choices = versus[~versus["axis"].isin(NO_CHOICES)]
    strategies = versus[versus["axis"] == "strategy"]
    batches = versus[versus["axis"] != "devices"]  # which have a table of their own
    return next((rows for rows in (choices, strategies, batches) if len(rows)), versus)


def leaders_table(leaders: pd.DataFrame) -> TextTable:
    """Return each setting against the fastest of its group; groups of one setting are left out."""

    def leads(row: Row) -> bool:
        return bool(row.cell_id == row.leader_id)

    def verdict(row: Row) -> str:
        if leads(row):
            return "fastest"
        return "too few blocks" if is_missing(row.tied) else "cannot be told apart" if row.tied else "slower"

    def to_fastest(row: Row) -> str:
        return "1" if leads(row) else estimate(ratio, row, "ratio")

    columns = (
        *CELL,
        ("global batch", "global_batch_size", flush_right),
        (rate_unit(leaders), "throughput_per_s", speed),
        ("to the fastest (95 % interval)", to_fastest, flush_right, "ratio"),
        ("p (Holm)", "p_value", decimal("{:.2g}")),
        ("verdict", verdict, words),
    )
    compared = rows_of(leaders[leaders["settings"] > 1])
    return make_table(columns, compared, lambda row: "base" if leads(row) else "")
