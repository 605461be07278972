"""Text tables of paired ratios: A/A test, Ray to torchrun, and every two cells that differ in one axis."""

from __future__ import annotations

import pandas as pd

from harness.plan.axis_pairs import SIZES
from harness.report.labels import cell_label, rate_unit, rows_with_setting, shown_devices, shown_strategy
from harness.report.row import Row, is_apart, is_missing, is_true
from harness.report.tables.scaling import marked
from harness.report.tables.text import Column, TextTable, decimal, estimate, flush_right, make_table, speed, words

ratio = decimal("{:.3f}")


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
    return make_table(columns, rows_with_setting(noise), _kind)


def parity_table(parity: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell under Ray against the same cell under torchrun."""
    unit = rate_unit(parity)
    speeds: tuple[Column, ...] = (
        (f"torchrun ({unit})", "control_throughput_per_s", speed),
        (f"Ray ({unit})", "throughput_per_s", speed),
    )
    columns: tuple[Column, ...] = (
        ("cell", cell_label, words),
        ("setting", "setting", words),
        *(() if narrow else speeds),
        ("Ray / torchrun (95 % interval)", _ratio, flush_right),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_with_setting(parity), _kind)


def versus_table(versus: pd.DataFrame, *, narrow: bool = False) -> TextTable:
    """Return each cell against another that differs in one axis; ``narrow``, for a terminal: without throughputs."""
    unit = rate_unit(versus)
    speeds: tuple[Column, ...] = (
        (f"second ({unit})", "other_throughput_per_s", speed),
        (f"first ({unit})", "throughput_per_s", speed),
    )
    columns: tuple[Column, ...] = (
        ("first / second", pair_label, words),
        ("setting", "setting", words),
        *(() if narrow else speeds),
        ("ratio (95 % interval)", _ratio, flush_right),
        ("n", "blocks", flush_right),
    )
    return make_table(columns, rows_with_setting(versus), _kind)


def _kind(row: Row) -> str:
    return "apart" if is_apart(row) else "base" if is_true(row["excludes_one"]) else ""


def pair_label(row: Row) -> str:
    """Return 'ddp / dp x2 (emulated)' for strategies, 'ddp x2, bucket_cap_mb 25 / 1' for other axes."""
    value, other, axis = str(row["value"]), str(row["other_value"]), str(row["axis"])
    apart = shown_strategy(row).removeprefix(str(row["strategy"]))
    if axis == "strategy":
        return f"{value} / {other} x{shown_devices(row)}{apart}"
    if axis == "devices":
        return f"{row['strategy']} x{value} / x{other}{apart}"
    name = axis.rpartition(".")[2].replace("_", " ") if "." not in axis else axis.rpartition(".")[2]
    return f"{cell_label(row)}, {name} {value} / {other}"


def main_axes(versus: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons that the file is about: of options and other choices, else of strategies, else all.

    A file that varies a choice, such as a bucket size or a precision, asks about it; strategies stand in most files.
    """
    choices = versus[~versus["axis"].isin([*SIZES, "strategy"])]
    strategies = versus[versus["axis"] == "strategy"]
    return next((rows for rows in (choices, strategies) if len(rows)), versus)


def _ratio(row: Row) -> str:
    if is_missing(row["ratio"]):
        return "not equivalent"
    return marked(estimate(ratio, row, "ratio"), row)
