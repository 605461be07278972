"""Frames as lists of rows and as CSV, several times as fast as pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from pandas.api.types import is_object_dtype

from harness.plan.trial import Columns
from harness.record.reading import naming_file
from harness.record.schema import Table


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
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


def _plain(column: pd.Series[Any]) -> list[object]:
    if getattr(column.dtype, "na_value", None) is not pd.NA:
        return column.tolist()
    values: list[object] = column.array.to_numpy(dtype=object, na_value=None).tolist()
    return values


ARROW = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_()}
ROWS = 1 << 20
"""Rows written at a time, so that the memory in use does not grow with the frame."""
FILES = 300
"""Files concatenated at a time."""
Part = tuple[str, int, Path]
"""(trial id, attempt, file with the rows)."""


def in_parquet(table: Table, columns: Columns) -> pa.Buffer:
    """Return one trial's columns as Parquet, typed as in the table; further columns have the types of their values.

    Without dictionaries and statistics: the files are small, written between trials and read whole.
    """
    dtypes = table.dtypes
    arrays = {name: pa.array(values, type=ARROW.get(dtypes.get(name, ""))) for name, values in columns.items()}
    file = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), file, use_dictionary=False, write_statistics=False, store_schema=False)
    return file.getvalue()


def gather(table: Table, parts: Sequence[Part]) -> pd.DataFrame:
    """Return the rows of all files, concatenated, as a frame of the table.

    Columns are converted to their final type one by one, so that millions of steps are held in memory once.
    """
    if not parts:
        return table.frame([])
    rows, counts = _joined(table, [path for _, _, path in parts])
    dtypes, columns = table.dtypes, dict[str, object]()
    for name in rows.column_names:
        values = rows.column(name)
        rows = rows.drop_columns([name])
        columns[name] = _column(values, dtypes.get(name))
        del values
        pa.default_memory_pool().release_unused()
    columns["trial_id"] = pd.array([trial_id for trial_id, _, _ in parts], dtype="string").repeat(counts)
    columns["attempt"] = pd.array([attempt for _, attempt, _ in parts], dtype="Int64").repeat(counts)
    return table.typed(pd.DataFrame(columns, copy=False))


def _column(values: pa.ChunkedArray, dtype: str | None) -> object:
    """Return a column in pandas' type; a number that is not finite keeps its value, and is not <NA>."""
    if dtype != "Float64":
        return values.to_pandas() if dtype is None else values.to_pandas().astype(dtype)
    numbers = values.cast(pa.float64())
    return pd.arrays.FloatingArray(np.array(numbers.to_numpy()), np.array(numbers.is_null().to_numpy()))


def read_frame(path: Path, table: Table) -> pd.DataFrame:
    """Return a compacted file as a frame of the table; raises RunFolderError."""
    rows, dtypes = read_table(path, table), table.dtypes
    columns = {name: _column(rows.column(name), dtypes.get(name)) for name in rows.column_names}
    return table.typed(pd.DataFrame(columns, copy=False))


def _joined(table: Table, paths: Sequence[Path]) -> tuple[pa.Table, list[int]]:
    """Return the rows of all files, in a few large chunks that can be freed one by one, and each file's row count."""
    counts, pieces = [], []
    for start in range(0, len(paths), FILES):
        read = [read_table(path, table) for path in paths[start : start + FILES]]
        counts += [part.num_rows for part in read]
        pieces.append(pa.concat_tables(read, promote_options="permissive").combine_chunks())
    return pa.concat_tables(pieces, promote_options="permissive"), counts


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as Parquet in parts; pandas reads the file back with the same types."""
    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    alike = [field.name for field in schema if not pa.types.is_floating(field.type)]
    with pq.ParquetWriter(path, schema, use_dictionary=alike) as writer:
        for start in range(0, len(frame), ROWS):
            part = frame.iloc[start : start + ROWS]
            writer.write_table(pa.Table.from_pandas(part, schema=schema, preserve_index=False))


MAX_ROWS = 100_000_000
_ARROW: Mapping[str, Callable[[pa.DataType], bool]] = {
    "string": lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    "Int64": pa.types.is_integer,
    "Float64": lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind),
    "boolean": pa.types.is_boolean,
}


def read_table(path: Path, table: Table) -> pa.Table:
    """Return a Parquet file's rows if its columns are of the table's types; raises RunFolderError."""
    # a plain file without read-ahead and threads: most files are small
    with naming_file(path), pa.OSFile(str(path)) as source, pq.ParquetFile(source, pre_buffer=False) as file:
        if file.metadata.num_rows > MAX_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows; at most {MAX_ROWS} are allowed")
        content = file.read(use_threads=False)  # half the time of pq.read_table
        _check_columns(content.schema, table)
        return content.replace_schema_metadata(None)  # pandas' metadata: not needed, and not trusted


def _check_columns(schema: pa.Schema, table: Table) -> None:
    first = table.columns[2].name  # the first after trial_id and attempt, which files in raw/ lack
    if first not in schema.names:
        raise ValueError(f"column {first!r} is missing: not the table {table.name}")
    dtypes = table.dtypes
    for field in schema:
        allowed = [_ARROW[dtypes[field.name]]] if field.name in dtypes else list(_ARROW.values())
        if not pa.types.is_null(field.type) and not any(is_kind(field.type) for is_kind in allowed):
            raise TypeError(f"column {field.name[:40]!r} has type {str(field.type)[:40]}")
