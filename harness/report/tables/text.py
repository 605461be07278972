"""Text tables: columns, rows, and the formats of numbers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import compress, zip_longest
from typing import Any, TypeAlias

import pandas as pd

from harness.analysis.stats import ENDS
from harness.plan.labels import devices_text
from harness.report.row import Row, Scalar, is_missing, number, plural, shown_strategy
from harness.report.row import words as words

NO_BREAK = "\N{NO-BREAK SPACE}"
LARGE_LOSS = 1e6
"""From which size on a loss is written with a power of ten."""
REST = "rest"
"""The kind of a last line, on the rows that are left out."""
LEAST_SORTED = 3
"""The fewest rows of a table that a reader may want to sort."""
EMPTY = ("", "-")
"""The texts of a missing value."""
Format: TypeAlias = Callable[[Scalar], str]
Value: TypeAlias = str | Callable[[Row], Scalar]
Column: TypeAlias = tuple[str, Value, Format] | tuple[str, Value, Format, str]
"""Heading; name of a column, or function of a row; format; the name of the number by which a column of text sorts.

Columns are set flush right unless their format is words.
"""


@dataclass(frozen=True)
class Heading:
    """A column of text; numbers are set flush right."""

    title: str
    number: bool = False


@dataclass(frozen=True)
class Line:
    """A row of text. ``kind`` is 'base', 'apart' (a rehearsal), REST or empty; ``numbers``: by which columns sort."""

    cells: tuple[str, ...]
    kind: str = ""
    numbers: tuple[float | None, ...] = ()

    @property
    def values(self) -> list[tuple[str, str]]:
        """The text of each cell and its number as text, empty if it has none."""
        return [
            (cell, "" if value is None else f"{value:.6g}") for cell, value in zip_longest(self.cells, self.numbers)
        ]


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    ``ordered``: rows belong together in this order, so that the page does not sort them. ``common``: headings and
    texts of the columns that are the same in every row, if they are not among the columns. ``rest``: the sentence on
    rows that are left out; empty if there are none.
    """

    columns: tuple[Heading, ...]
    lines: tuple[Line, ...]
    ordered: bool = False
    common: tuple[tuple[str, str], ...] = ()
    rest: str = ""

    @property
    def rows(self) -> tuple[Line, ...]:
        """The lines and, if rows are left out, a last one that says so."""
        return (*self.lines, *([Line((self.rest, *[""] * (len(self.columns) - 1)), REST)] if self.rest else []))

    @property
    def is_sortable(self) -> bool:
        return not self.ordered and len(self.lines) >= LEAST_SORTED

    def keep(self, kept: Sequence[bool]) -> TextTable:
        """Return the table with the columns that are kept alone."""
        lines = (
            replace(line, cells=tuple(compress(line.cells, kept)), numbers=tuple(compress(line.numbers, kept)))
            for line in self.lines
        )
        return replace(self, columns=tuple(compress(self.columns, kept)), lines=tuple(lines))

    def without_constants(self) -> TextTable:
        """Return the table with the columns that are the same in every row moved to ``common``."""
        varies = [len({*cells}) > 1 for cells in zip(*(line.cells for line in self.lines), strict=True)]
        if self.ordered or sum(varies) < 2:
            return self
        first = zip(self.columns, self.lines[0].cells, varies, strict=True)
        common = tuple((heading.title, cell) for heading, cell, is_varied in first if not is_varied)
        return replace(self.keep(varies), common=common)


def make_table(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, object]],
    kind: Callable[[Row], str] = lambda row: "",
    *,
    most: int | None = None,
    every: str = "",
    ordered: bool = False,
) -> TextTable:
    """Return the rows as text, without the columns that no row fills.

    ``kind`` is that of a line. At most ``most`` rows, with a last line on the others, which the file ``every`` has.
    ``ordered``: see TextTable.
    """
    headings = tuple(Heading(title, form is not words) for title, _, form, *_ in columns)
    lines = []
    for row in map(Row, rows[:most]):
        cells, numbers = [], []
        for _, value, form, *by in columns:
            found = value(row) if callable(value) else row[value]
            cells.append(form(found))
            key = row[by[0]] if by else found
            is_number = form is not words and not isinstance(key, str) and math.isfinite(number(key))
            numbers.append(number(key) if is_number else None)  # text, missing and infinite values come last
        lines.append(Line(tuple(cells), kind(row), tuple(numbers)))
    rest = f"and {len(rows) - len(lines)} more, in {every}" if len(rows) > len(lines) else ""
    table = TextTable(headings, tuple(lines), ordered, rest=rest)
    filled = [any(cell not in EMPTY for cell in cells) for cells in zip(*(line.cells for line in lines), strict=True)]
    return table.keep(filled) if lines else table


def flush_right(value: Scalar) -> str:
    """Return the same, for a column that is set flush right."""
    return words(value)


def or_dash(form: Callable[[float], str]) -> Format:
    """Make a format of numbers one that shows a missing value as '-'."""

    @wraps(form)
    def text(value: Scalar) -> str:
        return "-" if is_missing(value) else form(number(value))

    return text


def decimal(form: str, factor: float = 1.0) -> Format:
    """Return a format for numbers, '-' if missing: decimal("{:.1f} %", 100) shows 0.125 as '12.5 %'."""
    return or_dash(lambda value: form.format(factor * value))


CELL: tuple[Column, ...] = (
    ("setting", "setting", words),
    ("strategy", shown_strategy, words),
    ("devices", devices_text, flush_right, "devices"),
)
"""The columns that name a cell."""
percent = decimal("{:.0f} %", 100)


@or_dash
def speed(rate: float) -> str:
    """Return a throughput, a price or a number of samples with three significant digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def loss_form(largest: float) -> str:
    """Return the format of losses that stand together, by the largest: one that explodes has a power of ten."""
    return "{:.4g}" if abs(largest) >= LARGE_LOSS else "{:.4f}"


@or_dash
def size(count: float) -> str:
    """Return '1.5 GiB' or '79 KiB' for a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


@or_dash
def duration(seconds: float) -> str:
    """Return '42 s', '3 min 05 s' or '2 h 10 min' for seconds."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def start_text(seconds: object) -> str:
    """Return a Unix time as local time, '2026-11-24 04:10'; 'unknown' if it is missing."""
    if not isinstance(seconds, int | float) or seconds != seconds:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def with_ends(form: Format, value: Scalar, low: Scalar, high: Scalar) -> str:
    """Return '62 % (58 to 66 %)', a value with its interval if there is one; it is not broken over lines."""
    if is_missing(low) or is_missing(high):
        return form(value)
    return f"{form(value)} ({form(low).removesuffix(' %')} to {form(high)})".replace(" ", NO_BREAK)


def estimate(form: Format, row: Row, name: str, prefix: str = "") -> str:
    """Return the value ``name`` of a row with its interval or, below 3 blocks, '62 % (n = 2: 58 to 66 %)', its range.

    ``prefix``: that of the columns low, high, least and most.
    """
    value, (low, high, least, most) = row[name], (row[f"{prefix}{end}"] for end in ENDS)
    if is_missing(value) or not is_missing(low):
        return with_ends(form, value, low, high)
    blocks = f"n = {row.blocks}"
    if is_missing(least) or least == most:
        return f"{form(value)} ({blocks})".replace(" ", NO_BREAK)
    return with_ends(form, value, least, most).replace("(", f"({blocks}: ".replace(" ", NO_BREAK), 1)


def span(form: Callable[[float], str], values: pd.Series[Any]) -> str:
    """Return '2 to 3', the least and the largest of some values, or one of both if they look the same."""
    return " to ".join(dict.fromkeys(map(form, (values.min(), values.max()))))


def first_of(names: Sequence[str], most: int) -> str:
    """Return the names joined by semicolons, 'a; b; ...' if there are more than ``most``."""
    return "; ".join(names[:most]) + "; ..." * (len(names) > most)


def ranges(numbers: Sequence[int]) -> str:
    """Return '0, 2 to 5' for sorted whole numbers."""
    spans: list[list[int]] = []
    for one in numbers:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def impossible_lines(reasons: Mapping[str, int], most: int = 8) -> list[str]:
    """Return a line for each reason that no machine can run some cells, with their number; at most ``most`` lines."""
    lines = [f"No machine can run {plural(count, 'cell')}: {reason}." for reason, count in reasons.items()]
    left_out = sum([*reasons.values()][most:])
    rest = [f"No machine can run {left_out} more, for like reasons; plan.json has all."] if left_out else []
    return lines[:most] + rest


def counts(values: Sequence[str]) -> str:
    """Return '3 ok, 1 oom', in the order of appearance."""
    return ", ".join(f"{count} {value}" for value, count in Counter(values).items())
