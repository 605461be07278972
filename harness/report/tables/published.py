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
FORMS: Mapping[str, Sequence[tuple[float, str, float, str]]] = {
    "1": ((0.0, "%", 100.0, "{:.2f}"),),
    "dB": ((0.0, "dB", 1.0, "{:.2f}"),),
    "s": ((1.0, "s", 1.0, "{:,.2f}"), (0.0, "ms", 1000.0, "{:,.1f}")),
    "bytes": ((0.0, "GiB", 1 / GIB, "{:,.2f}"),),
    "": ((LARGE_LOSS, "", 1.0, "{:.4g}"), (100.0, "", 1.0, "{:,.0f}"), (0.0, "", 1.0, "{:.4f}")),
}
"""By unit of the column: from which size on a number is shown in which unit, with its factor and format."""
OF_RATES = ((0.0, "", 1.0, "{:,.5g}"),)


def published_table(published: pd.DataFrame) -> TextTable:
    """Return each published figure beside the measured one, and how far both are apart."""
    columns = (
        ("cell", "cell", words),
        ("figure", _figure, words),
        ("published", lambda row: _span(row, row.published_low, row.published_high), flush_right),
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
    level, _, title = METRICS[row.metric]
    last = ["last epoch"] if level == "epochs" and not places else []
    unit = f" in {row.metric_unit}" if row.metric == RATE and not is_missing(row.metric_unit) else ""
    return ", ".join([f"{title}{unit}", *places, *last])


def _number(row: Row, value: float, size: float) -> tuple[str, str]:
    """Return a number and its unit, both as suits ``size``, the largest of those that stand together."""
    if math.isnan(value):
        return "nan", ""
    forms = FORMS.get(words(row.metric_unit), OF_RATES)
    _, unit, factor, form = next(one for one in forms if not size < one[0])
    return form.format(factor * value), unit


def _span(row: Row, *values: float) -> str:
    """Return '40.0 to 45.0 ms', or one number if all look the same."""
    shown = dict.fromkeys(_number(row, value, max(map(abs, values))) for value in values)
    _, unit = next(reversed(shown))
    return NO_BREAK.join(filter(None, [" to ".join(text for text, _ in shown), unit]))


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
    return f"{sign}{_span(row, row.difference).replace('%', 'points')}{share}"
