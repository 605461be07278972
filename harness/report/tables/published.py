"""Text table of published figures beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from harness.config.published import METRICS
from harness.config.values import GIB
from harness.report.row import Row, is_missing, is_true, number, rows_of
from harness.report.tables.text import LARGE_LOSS, NO_BREAK, TextTable, flush_right, make_table, percent, words

RATE = "throughput_per_s"
OTHER = "other hardware"
NAMES = {
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "val_loss": "validation loss",
    "val_accuracy": "validation accuracy",
    "val_perplexity": "validation perplexity",
    "val_psnr": "validation PSNR",
    "val_iou": "validation IoU",
    "loss": "loss",
    "running_loss": "mean loss so far",
    "step_s": "step time",
    RATE: "throughput",
    "peak_memory_bytes": "peak memory",
}
"""The figures in words."""
UNITS: Mapping[str, Sequence[tuple[float, str, str]]] = {
    "1": ((0.0, "%", "{:.2f}"),),
    "dB": ((0.0, "dB", "{:.2f}"),),
    "s": ((1.0, "s", "{:,.2f}"), (0.0, "ms", "{:,.1f}")),
    "bytes": ((0.0, "GiB", "{:,.2f}"),),
    "": ((LARGE_LOSS, "", "{:.4g}"), (100.0, "", "{:,.0f}"), (0.0, "", "{:.4f}")),
}
"""By unit of the column: from which size on a number is shown in which unit, and its format; else as a rate."""
FACTORS = {"%": 100.0, "ms": 1000.0, "GiB": 1 / GIB}
POINTS = "points"
"""The unit of a difference of percentages."""


def published_table(published: pd.DataFrame) -> TextTable:
    """Return each published figure beside the measured one, and how far both are apart."""
    columns = (
        ("cell", "cell", words),
        ("figure", _figure, words),
        ("published", _published, flush_right),
        ("measured", _measured, flush_right),
        ("n", "n", flush_right),
        ("difference", _difference, flush_right),
        ("measured on", lambda row: OTHER if is_true(row.other_hardware) else "the same model", words),
    )
    return make_table(columns, rows_of(published), lambda row: "apart" if is_true(row.other_hardware) else "")


def published_words(published: pd.DataFrame) -> str:
    """Return what the table shows, and the sources with their hardware."""
    rows = rows_of(published)
    sources = dict.fromkeys(
        f"{row.source}{'' if is_missing(row.url) else f' ({row.url})'}: {row.hardware}." for row in rows
    )
    here = words(rows[0].measured_on) or "unknown hardware"
    return (
        "Figures that others published beside this run's: the mean over seeds or blocks, and its difference from what "
        f"was published, or from the nearer end of a range. In italics: measured on {OTHER}, so that a difference in "
        f"time is one of machines too. Here: {here}. Published by {' '.join(sources)}"
    )


def _figure(row: Row) -> str:
    places = [f"{name} {row[name]}" for name in ("epoch", "step") if not is_missing(row[name])]
    last = [] if places or METRICS[row.metric][0] != "epochs" else ["last epoch"]
    unit = f" in {row.metric_unit}" if row.metric == RATE and not is_missing(row.metric_unit) else ""
    return ", ".join([f"{NAMES[row.metric]}{unit}", *places, *last])


def _number(row: Row, value: float, size: float) -> tuple[str, str]:
    """Return a number and its unit, both as suits ``size``, the largest of those that stand together."""
    if math.isnan(value):
        return "nan", ""
    forms = UNITS.get(words(row.metric_unit), ((0.0, "", "{:,.5g}"),))
    unit, form = next((unit, form) for least, unit, form in forms if not size < least)
    return form.format(FACTORS.get(unit, 1.0) * value), unit


def _span(row: Row, *values: float) -> str:
    """Return '40.0 to 45.0 ms', or one number if all look the same."""
    shown = dict.fromkeys(_number(row, value, max(map(abs, values))) for value in values)
    _, unit = next(reversed(shown))
    return NO_BREAK.join(filter(None, [" to ".join(text for text, _ in shown), unit]))


def _published(row: Row) -> str:
    return _span(row, number(row.published_low), number(row.published_high))


def _measured(row: Row) -> str:
    if not row.n:
        other_unit = row.metric == RATE and not is_missing(row.unit) and row.metric_unit != f"{row.unit}/s"
        return f"counted in {row.unit}" if other_unit else "not measured"
    low, high = number(row.measured_low), number(row.measured_high)
    spread = f" ({_span(row, low, high)})" if _span(row, low) != _span(row, high) else ""
    return f"{_span(row, number(row.measured))}{spread}"


def _difference(row: Row) -> str:
    if row.measured is None:
        return ""
    if is_missing(row.difference):
        both = math.isnan(number(row.measured)) and math.isnan(number(row.published_low))
        return "both nan" if both else "one is nan"
    if not row.difference:
        return "within the range" if row.published_low != row.published_high else "none"
    sign = "+" if row.difference > 0 else ""
    share = "" if is_missing(row.relative_difference) else f" ({sign}{percent(row.relative_difference)})"
    return f"{sign}{_span(row, row.difference).replace('%', POINTS)}{share}"
