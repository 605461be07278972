"""Text tables: columns, rows, and the formats of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from harness.analysis.stats import ENDS
from harness.report.row import Row, Scalar, is_missing, number

NO_BREAK = "\N{NO-BREAK SPACE}"
Format: TypeAlias = Callable[[Scalar], str]
Column: TypeAlias = tuple[str, str | Callable[[Row], Scalar], Format]
"""Heading; name of a column, or function of a row; format. Columns are set flush right unless their format is words."""


@dataclass(frozen=True)
class Heading:
    """A column of text; numbers are set flush right."""

    title: str
    number: bool = False


@dataclass(frozen=True)
class Line:
    """A row of text. ``kind`` is 'base', 'apart' (a rehearsal) or empty."""

    cells: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class TextTable:
    columns: tuple[Heading, ...]
    rows: tuple[Line, ...]


def make_table(
    columns: Sequence[Column], rows: Iterable[Row], kind: Callable[[Row], str] = lambda row: "", rest: str = ""
) -> TextTable:
    """Return the rows as text. ``kind`` is that of a line; ``rest``, if any, is a last line of its own."""
    headings = tuple(Heading(title, form is not words) for title, _, form in columns)
    lines = [
        Line(tuple(form(value(row) if callable(value) else row[value]) for _, value, form in columns), kind(row))
        for row in rows
    ]
    headings, lines = _without_empty(headings, lines)
    if rest:
        lines.append(Line((rest, *[""] * (len(headings) - 1))))
    return TextTable(headings, tuple(lines))


def _without_empty(headings: tuple[Heading, ...], lines: list[Line]) -> tuple[tuple[Heading, ...], list[Line]]:
    """Return headings and lines without the columns of text that no line fills."""
    kept = [
        index
        for index, heading in enumerate(headings)
        if heading.number or not lines or any(line.cells[index] for line in lines)
    ]
    return tuple(headings[index] for index in kept), [
        replace(line, cells=tuple(line.cells[index] for index in kept)) for line in lines
    ]


def words(value: Scalar) -> str:
    """Return text, empty if the value is missing."""
    return "" if is_missing(value) else str(value)


def flush_right(value: Scalar) -> str:
    """Return the same, for a column that is set flush right."""
    return words(value)


def decimal(form: str, factor: float = 1.0) -> Format:
    """Return a format for numbers, '-' if missing: decimal("{:.1f} %", 100) shows 0.125 as '12.5 %'."""
    return lambda value: "-" if is_missing(value) else form.format(factor * number(value))


percent = decimal("{:.0f} %", 100)
milliseconds = decimal("{:.2f}", 1000)


def speed(value: Scalar) -> str:
    """Return a throughput with three significant digits at least."""
    if is_missing(value):
        return "-"
    rate = number(value)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def size(value: Scalar) -> str:
    """Return '1.5 GiB' or '79 KiB' for a number of bytes."""
    if is_missing(value):
        return "-"
    count = number(value)
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def duration(value: Scalar) -> str:
    """Return '42 s', '3 min 05 s' or '2 h 10 min' for seconds, '-' for a missing value."""
    if is_missing(value):
        return "-"
    whole = round(number(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
    blocks = f"n = {row['blocks']}"
    if is_missing(least) or least == most:
        return f"{form(value)} ({blocks})".replace(" ", NO_BREAK)
    return with_ends(form, value, least, most).replace("(", f"({blocks}: ".replace(" ", NO_BREAK), 1)


def ranges(numbers: Sequence[int]) -> str:
    """Return '0, 2 to 5' for sorted whole numbers."""
    spans: list[list[int]] = []
    for one in numbers:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def plural(count: int, noun: str) -> str:
    """Return '1 block' or '2 blocks'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def impossible_lines(reasons: Mapping[str, int], most: int = 8) -> list[str]:
    """Return a line for each reason that no machine can run some cells, with their number; at most ``most`` lines."""
    lines = [f"No machine can run {plural(count, 'cell')}: {reason}." for reason, count in reasons.items()]
    left_out = sum([*reasons.values()][most:])
    rest = [f"No machine can run {left_out} more, for like reasons; plan.json has all."] if left_out else []
    return lines[:most] + rest


def counts(values: Sequence[str]) -> str:
    """Return '3 ok, 1 oom', in the order of appearance."""
    tally = {value: values.count(value) for value in dict.fromkeys(values)}
    return ", ".join(f"{count} {value}" for value, count in tally.items())
