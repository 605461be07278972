"""Text tables: columns, rows, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

NO_BREAK = "\N{NO-BREAK SPACE}"


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


def ranges(numbers: Sequence[int]) -> str:
    """'0, 2 to 5' of sorted whole numbers."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def speed(value: Any) -> str:
    """A throughput with three significant digits at least."""
    return "-" if pd.isna(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: Any) -> str:
    return "-" if pd.isna(value) else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """'42 s', '3 min 05 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """'1 block', '2 blocks'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def counts(values: Sequence[str]) -> str:
    """'3 ok, 1 oom' in the order of appearance."""
    tally = {value: values.count(value) for value in dict.fromkeys(values)}
    return ", ".join(f"{count} {value}" for value, count in tally.items())


def _number(value: Any) -> str:
    return "-" if pd.isna(value) else f"{value:.2f}"


def with_ends(shown: Callable[[Any], str], value: Any, low: Any, high: Any) -> str:
    """'62 % (58 to 66 %)': a value with its interval, where it has one; it is not broken over lines."""
    if pd.isna(low) or pd.isna(high):
        return shown(value)
    return f"{shown(value)} ({shown(low).removesuffix(' %')} to {shown(high)})".replace(" ", NO_BREAK)
