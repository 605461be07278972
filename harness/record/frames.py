"""Frames as lists of rows and as CSV, several times as fast as pandas."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pc
from pandas.api.types import is_object_dtype


def records(frame: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return the rows as ``frame.to_dict("records")`` does, with None for <NA>."""
    if frame.empty:
        return []
    names = frame.columns.tolist()
    columns = [_plain(column) for _, column in frame.items()]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def csv_bytes(frame: pd.DataFrame) -> pa.Buffer:
    """Return CSV with quoted texts; a missing value is an empty field, a value of another type its ``str()``."""
    plain = frame.copy(deep=False)
    for name, column in frame.items():
        if is_object_dtype(column.dtype):
            plain[name] = column.map(str, na_action="ignore").astype("string")
    out = pa.BufferOutputStream()
    pc.write_csv(pa.Table.from_pandas(plain, preserve_index=False), out)
    return out.getvalue()


def _plain(column: pd.Series[Any]) -> list[Any]:
    if getattr(column.dtype, "na_value", None) is not pd.NA:
        return column.tolist()
    values: list[Any] = column.array.to_numpy(dtype=object, na_value=None).tolist()
    return values
