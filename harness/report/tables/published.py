"""Text table of published figures beside what was measured."""

from __future__ import annotations

import math

import pandas as pd

from harness.report.row import Row, is_missing, is_true, number, rows_of
from harness.report.tables.text import NO_BREAK, Column, TextTable, decimal, flush_right, make_table, percent, words
from harness.system.units import GIB

RATE = "throughput_per_s"
OTHER = "other hardware"
PLAIN = decimal("{:,.5g}")
FORMS = {
    "1": decimal(f"{{:.2f}}{NO_BREAK}%", 100),
    "s": decimal(f"{{:,.4g}}{NO_BREAK}ms", 1000),
    "bytes": decimal(f"{{:,.3g}}{NO_BREAK}GiB", 1 / GIB),
}
"""The format of numbers of each unit."""


def published_table(published: pd.DataFrame) -> TextTable:
    """Return each published figure beside the measured one, and how far both are apart."""
    columns: tuple[Column, ...] = (
        ("cell", "cell", words),
        ("figure", _figure, words),
        ("published", _published, flush_right),
        ("measured", _measured, flush_right),
        ("n", "n", flush_right),
        ("difference", _difference, flush_right),
        ("hardware", lambda row: OTHER if is_true(row["other_hardware"]) else "the same model", words),
    )
    return make_table(columns, rows_of(published), lambda row: "apart" if is_true(row["other_hardware"]) else "")


def published_words(published: pd.DataFrame) -> str:
    """Return what the table shows, and the sources with their hardware."""
    sources = dict.fromkeys(f"{_source(row)}: {row['hardware']}." for row in rows_of(published))
    here = words(rows_of(published[:1])[0]["measured_on"]) or "unknown hardware"
    return (
        "Figures that others published beside this run's: the mean over seeds or blocks, and its difference from what "
        f"was published, or from the nearer end of a range. In italics: measured on {OTHER}, so that a difference in "
        f"time is one of machines too. Here: {here}. Published by {' '.join(sources)}"
    )


def _source(row: Row) -> str:
    return str(row["source"]) + ("" if is_missing(row["url"]) else f" ({row['url']})")


def _figure(row: Row) -> str:
    places = [f"{name} {row[name]}" for name in ("epoch", "step") if not is_missing(row[name])]
    unit = [f"in {row['metric_unit']}"] if row["metric"] == RATE and not is_missing(row["metric_unit"]) else []
    return ", ".join([" ".join([str(row["metric"]), *unit]), *places])


def _other_unit(row: Row) -> bool:
    """Return whether a throughput was published in another unit than the one in which the workload counts."""
    return row["metric"] == RATE and not is_missing(row["unit"]) and row["metric_unit"] != f"{row['unit']}/s"


def _text(row: Row, name: str) -> str:
    value = row[name]
    if value is None:
        return ""
    return "nan" if math.isnan(number(value)) else FORMS.get(words(row["metric_unit"]), PLAIN)(value)


def _published(row: Row) -> str:
    low, high = (_text(row, f"published_{end}") for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _measured(row: Row) -> str:
    if is_missing(row["n"]) or not number(row["n"]):
        return f"counted in {row['unit']}" if _other_unit(row) else "not measured"
    low, high = (_text(row, f"measured_{end}") for end in ("low", "high"))
    return f"{_text(row, 'measured')}{f' ({low} to {high})' if low != high else ''}"


def _difference(row: Row) -> str:
    if row["measured"] is None:
        return ""
    if is_missing(row["difference"]):
        both = math.isnan(number(row["measured"])) and math.isnan(number(row["published_low"]))
        return "both nan" if both else "one is nan"
    if not number(row["difference"]):
        return "within the range" if row["published_low"] != row["published_high"] else "none"
    sign = "+" if number(row["difference"]) > 0 else ""
    share = "" if is_missing(row["relative_difference"]) else f" ({sign}{percent(row['relative_difference'])})"
    return f"{sign}{_text(row, 'difference')}{share}"
