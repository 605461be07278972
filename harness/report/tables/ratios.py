"""Text tables of paired ratios: A/A test, Ray to torchrun, any axis, the fastest settings."""

from __future__ import annotations

import pandas as pd

from harness.analysis.common import is_no_claim
from harness.analysis.verdict.choices import NO_CHOICES
from harness.plan.labels import SEPARATOR, joined
from harness.report.labels import (
    Row,
    Scalar,
    cell_label,
    is_missing,
    is_not_equivalent,
    is_true,
    number,
    rate_unit,
    rows_of,
    setting_without,
    shown_devices,
    shown_strategy,
    why_excluded,
)
from harness.report.tables.scaling import marked
from harness.report.tables.text import Column, TextTable, decimal, estimate, flush_right, make_table, speed, words

LARGE = 10.0
"""The ratio from which on three digits are written."""
_small = decimal("{:.3f}")


def ratio(value: Scalar) -> str:
    """Return a ratio with three decimals, a large one with three digits."""
    return speed(value) if not is_missing(value) and number(value) >= LARGE else _small(value)


def noise_table(noise: pd.DataFrame) -> TextTable:
    """Return each base against its twin."""
    unit = rate_unit(noise)
    columns: tuple[Column, ...] = (
        ("setting", "setting", words),
        (f"base ({unit})", "throughput_per_s", speed),
        (f"twin ({unit})", "twin_throughput_per_s", speed),
        ("twin / base (95 % interval)", _ratio, flush_right),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_of(noise), _kind, keys={"twin / base (95 % interval)": "ratio"})


def parity_table(parity: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell under Ray against the same cell under torchrun."""
    unit = rate_unit(parity)
    speeds: tuple[Column, ...] = (
        (f"torchrun ({unit})", "control_throughput_per_s", speed),
        (f"Ray ({unit})", "throughput_per_s", speed),
    )
    columns: tuple[Column, ...] = (
        ("cell", cell_label, words),
        ("setting", _beside_launchers, words),
        *(() if narrow else speeds),
        ("Ray / torchrun (95 % interval)", _ratio, flush_right),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_of(parity), _kind, keys={"Ray / torchrun (95 % interval)": "ratio"})


def versus_table(versus: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell against another that differs in one axis; ``narrow``, for a terminal: without throughputs."""
    unit = rate_unit(versus)
    speeds: tuple[Column, ...] = (
        (f"second ({unit})", "other_throughput_per_s", speed),
        (f"first ({unit})", "throughput_per_s", speed),
    )
    columns: tuple[Column, ...] = (
        ("first / second", pair_label, words),
        ("setting", pair_setting, words),
        *(() if narrow else speeds),
        ("ratio (95 % interval)", _ratio, flush_right),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_of(versus), _kind, keys={"ratio (95 % interval)": "ratio"})


def _kind(row: Row) -> str:
    return "apart" if is_no_claim(row) or is_not_equivalent(row) else "base" if is_true(row["excludes_one"]) else ""


def pair_label(row: Row) -> str:
    """Return 'ddp x2 / dp (emulated) x2', or 'ddp x2 · bucket_cap_mb=25 / 1': the parts in which both labels differ."""
    placed, first, second, _ = _compared(row)
    key = first.partition("=")[0] + "="
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
    return setting_without(row, str(row["launcher"]))


def main_axes(versus: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons that the file is about: of options and other choices, else of strategies, else all.

    A file that varies a choice, such as a bucket size or a precision, asks about it; strategies stand in most files.
    """
    choices = versus[~versus["axis"].isin(NO_CHOICES)]
    strategies = versus[versus["axis"] == "strategy"]
    return next((rows for rows in (choices, strategies) if len(rows)), versus)


def _ratio(row: Row) -> str:
    if is_missing(row["ratio"]):
        return why_excluded(row)
    return marked(estimate(ratio, row, "ratio"), row)


def leaders_table(leaders: pd.DataFrame) -> TextTable:
    """Return each setting against the fastest of its group; groups of one setting are left out."""
    compared = leaders[leaders["settings"] > 1]
    columns: tuple[Column, ...] = (
        ("setting", "setting", words),
        ("strategy", shown_strategy, words),
        ("devices", shown_devices, flush_right),
        ("global batch", "global_batch_size", flush_right),
        (rate_unit(leaders), "throughput_per_s", speed),
        ("to the fastest (95 % interval)", _leaders_ratio, flush_right),
        ("p (Holm)", "p_value", decimal("{:.2g}")),
        ("verdict", _verdict, words),
    )
    keys = {"devices": "devices", "to the fastest (95 % interval)": "ratio"}
    return make_table(columns, rows_of(compared), lambda row: "base" if _leads(row) else "", keys=keys)


def _leads(row: Row) -> bool:
    return row["cell_id"] == row["leader_id"]


def _leaders_ratio(row: Row) -> str:
    return "1" if _leads(row) else estimate(ratio, row, "ratio")


def _verdict(row: Row) -> str:
    if _leads(row):
        return "fastest"
    if is_missing(row["tied"]):
        return "too few blocks"
    return "cannot be told apart" if is_true(row["tied"]) else "slower"
