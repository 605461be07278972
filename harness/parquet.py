"""Columns of plain values as small parquet files, and many of those as one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.reading import read_table
from harness.schema import Table

ARROW = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_()}
ROWS = 1 << 20
"""Rows that are turned into parquet at a time: what this takes of memory does not grow with the frame."""
Part = tuple[str, int, Path]
"""A trial's id, its attempt, and the file with its rows."""


def write_columns(path: Path, table: Table, columns: Mapping[str, Sequence[Any]]) -> None:
    """One trial's columns, with the types of the table; columns that it does not know get those of their values.

    Plain values without statistics: such files are small, written between trials and read whole.
    """
    types = {column.name: ARROW[column.dtype] for column in table.columns}
    arrays = {name: pa.array(values, type=types.get(name)) for name, values in columns.items()}
    with pa.OSFile(str(path), "wb") as file:
        pq.write_table(pa.table(arrays), file, use_dictionary=False, write_statistics=False, store_schema=False)


def gather(table: Table, parts: Sequence[Part]) -> pd.DataFrame:
    """The rows of all files under each other as a frame of the table.

    Column by column, each from the files straight to its final type: millions of steps are held once.
    Raises RunFolderError.
    """
    read = [read_table(path, table) for _, _, path in parts]
    if not read:
        return table.frame([])
    counts = [part.num_rows for part in read]
    rows = pa.concat_tables(read, promote_options="permissive")
    del read
    dtypes = {column.name: column.dtype for column in table.columns}
    columns: dict[str, Any] = {
        "trial_id": pd.array([trial_id for trial_id, _, _ in parts], dtype="string").repeat(counts),
        "attempt": pd.array([attempt for _, attempt, _ in parts], dtype="Int64").repeat(counts),
    }
    for name in [name for name in rows.column_names if name not in columns]:
        values = rows.column(name).combine_chunks().to_pandas()
        rows = rows.drop_columns([name])
        columns[name] = values.astype(dtypes[name]) if name in dtypes else values
    return table.typed(pd.DataFrame(columns, copy=False))


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """A whole frame; pandas reads it back with its types."""
    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    alike = [field.name for field in schema if not pa.types.is_floating(field.type)]
    with pq.ParquetWriter(path, schema, use_dictionary=alike) as writer:
        for start in range(0, len(frame), ROWS):
            part = frame.iloc[start : start + ROWS]
            writer.write_table(pa.Table.from_pandas(part, schema=schema, preserve_index=False))
