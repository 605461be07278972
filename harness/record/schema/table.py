"""A table and its columns, each with name, type, unit and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

DType = Literal["string", "Int64", "Float64", "boolean"]


@dataclass(frozen=True)
class Column:
    """One column of a table. ``unit`` is empty for texts, flags and numbers without one."""

    name: str
    dtype: DType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """A table: its name, the meaning of one row, and its columns in order."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def frame(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """Return a typed frame of these rows, with <NA> for missing values; columns unknown to the table come last."""
        return self.typed(pd.DataFrame(list(rows)))

    def typed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with every column of the table, in its order and type; further columns come last."""
        extra = [name for name in frame.columns if name not in self.names]
        columns = {
            column.name: frame[column.name].astype(column.dtype)
            if column.name in frame
            else pd.Series(pd.NA, index=frame.index, dtype=column.dtype)
            for column in self.columns
        }
        # no copy: millions of steps are held in memory once; pandas copies on write
        return pd.DataFrame({**columns, **{name: frame[name] for name in extra}}, index=frame.index, copy=False)


def column(name: str, dtype: DType, meaning: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, meaning)
