"""Text table of the fastest settings: for each model, device count and global batch, the leader and the others."""

from __future__ import annotations

import pandas as pd

from harness.report.labels import rate_unit, shown_devices, shown_strategy
from harness.report.row import Row, is_missing, is_true, rows_of
from harness.report.tables.ratios import ratio
from harness.report.tables.text import Column, TextTable, decimal, estimate, flush_right, make_table, speed, words


def leaders_table(leaders: pd.DataFrame) -> TextTable:
    """Return each setting against the fastest of its group; groups of one setting are left out."""
    compared = leaders[leaders["settings"] > 1]
    columns: tuple[Column, ...] = (
        ("setting", "setting", words),
        ("strategy", shown_strategy, words),
        ("devices", shown_devices, flush_right),
        ("global batch", "global_batch_size", flush_right),
        (rate_unit(leaders), "throughput_per_s", speed),
        ("to the fastest (95 % interval)", _ratio, flush_right),
        ("p (Holm)", "p_value", decimal("{:.2g}")),
        ("verdict", _verdict, words),
    )
    keys = {"devices": "devices", "to the fastest (95 % interval)": "ratio"}
    return make_table(columns, rows_of(compared), lambda row: "base" if _leads(row) else "", keys=keys)


def _leads(row: Row) -> bool:
    return row["cell_id"] == row["leader_id"]


def _ratio(row: Row) -> str:
    return "1" if _leads(row) else estimate(ratio, row, "ratio")


def _verdict(row: Row) -> str:
    if _leads(row):
        return "fastest"
    if is_missing(row["tied"]):
        return "too few blocks"
    return "cannot be told apart" if is_true(row["tied"]) else "slower"
