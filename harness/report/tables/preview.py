"""Text of the preview: time, device-hours, cost and energy by part, estimated before a run and as they were."""

from __future__ import annotations

import pandas as pd

from harness.analysis.graded import MEASUREMENT, TOTAL
from harness.report.row import Row, Scalar, is_missing, number, rows_of
from harness.report.tables.text import Column, TextTable, duration, flush_right, make_table, percent, words

SUMS = (MEASUREMENT, TOTAL)


def amount(value: Scalar) -> str:
    """Return device-hours, kilowatt-hours or money: at least three digits, at most four decimal places."""
    if is_missing(value):
        return "-"
    found = number(value)
    return f"{found:,.0f}" if found >= 100 or not found else f"{found:.3g}" if found >= 0.1 else f"{found:.4f}"


def preview_table(preview: pd.DataFrame) -> TextTable:
    """Return each part with its time, device-hours, cost and energy: estimated, and actual if there was a run."""
    ran = bool(preview["actual_s"].notna().any())
    before, after = (", estimated", "") if ran else ("", "")
    columns: tuple[Column, ...] = (
        ("part", "label", words),
        ("trials", _trials, flush_right),
        (f"time{before}", _estimated, flush_right),
        *(((f"time{after}", "actual_s", duration), ("error", "error", _signed)) if ran else ()),
        *_both("device-hours", "device_hours", ran=ran),
        *_both("in use", "busy_device_hours", ran=ran),
        *_both(_money(preview), "cost", ran=ran),
        *_both("kWh", "energy_kwh", ran=ran),
        ("memory", "fits", words),
    )
    return make_table(columns, rows_of(preview), lambda row: "base" if row["part"] in SUMS else "", ordered=True)


def _both(title: str, name: str, *, ran: bool) -> tuple[Column, ...]:
    before: Column = (f"{title}, estimated" if ran else title, f"estimated_{name}", amount)
    return (before, (title, f"actual_{name}", amount)) if ran else (before,)


def _money(preview: pd.DataFrame) -> str:
    known = preview["currency"].dropna()
    return str(known.iloc[0]) if len(known) else "cost"


def _trials(row: Row) -> str:
    """Return '3', or '2 of 3' if not all planned trials were started."""
    planned, started = row["planned_trials"], row["measured_trials"]
    if is_missing(planned) or is_missing(started) or planned == started:
        found = started if is_missing(planned) else planned
        return "" if is_missing(found) or not number(found) else f"{number(found):.0f}"
    return f"{number(started):.0f} of {number(planned):.0f}"


def _estimated(row: Row) -> str:
    if is_missing(row["estimated_s"]):
        return words(row["basis"])
    return f"{'at least ' if row['basis'] == 'lower bound' else ''}{duration(row['estimated_s'])}"


def _signed(value: Scalar) -> str:
    return "-" if is_missing(value) else f"{'+' if number(value) > 0 else ''}{percent(value)}"


def grade_line(preview: pd.DataFrame) -> str:
    """Return a sentence on the estimate of a run beside what it took; empty if there was no estimate, or no run."""
    sums = [row for row in rows_of(preview) if row["part"] in SUMS and not is_missing(row["actual_s"])]
    if not sums or is_missing(sums[-1]["estimated_s"]):
        return ""
    row = next((row for row in reversed(sums) if row["basis"] == "earlier run"), sums[-1])
    until = "" if row["part"] == TOTAL else " until the report"
    error = "" if is_missing(row["error"]) else f" ({_signed(row['error'])})"
    without = ", without the parts of unknown time" if row["basis"] == "unknown" else ""
    took = f"Estimated before the run: {_estimated(row)}{until}{without}{error}; it took {duration(row['actual_s'])}"
    if is_missing(row["actual_device_hours"]):
        return f"{took}."
    device_hours = [amount(row[f"{side}_device_hours"]) for side in ("estimated", "actual")]
    return f"{took}. Device-hours: {device_hours[0]} estimated, {device_hours[1]} used."
