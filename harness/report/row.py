"""Rows of a table as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import pandas as pd

from harness.record.frames import records

Scalar: TypeAlias = str | float | None
"""A value of a table: text, number (an int or a bool is a float to a type checker), or None if it is missing."""
NOT_EQUIVALENT = "not equivalent"
"""The verdict of a check whose training differs from that of one device."""
Row: TypeAlias = Mapping[str, Scalar]


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a table; <NA> is None."""
    return [*records(frame)]


def is_missing(value: Scalar) -> bool:
    return value is None or bool(pd.isna(value))


def is_true(value: Scalar) -> bool:
    """Return whether a flag is set; a missing flag is not."""
    return not is_missing(value) and bool(value)


def number(value: Scalar) -> float:
    """Return a number of a row; NaN if it is missing. Raises TypeError if it is text."""
    if isinstance(value, str):
        raise TypeError(f"got the text {value!r}; expected a number")
    return float("nan") if value is None or pd.isna(value) else float(value)


def texts(value: Scalar) -> list[str]:
    """Return a list of a row as texts; without any if it is missing."""
    return [str(one) for one in value] if isinstance(value, tuple) else []


def is_unverified(row: Row) -> bool:
    """Return whether the check whether the row's cells train as one device does has no verdict."""
    return row.get("equivalence") == "unknown"


def is_not_equivalent(row: Row) -> bool:
    """Return whether the row's cells do not train as one device does."""
    return row.get("equivalence") == NOT_EQUIVALENT


def why_excluded(row: Row) -> str:
    """Return in two words why the row has no ratio."""
    return str(row["excluded"]).partition(":")[0]
