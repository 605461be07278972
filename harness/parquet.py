"""Columns of plain values as small parquet files, and many of those as one frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.plan.trial import Columns
from harness.reading import read_table
from harness.schema import Table
from harness.system.files import begin_reading

ARROW = {"string": pa.string(), "Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_()}
ROWS = 1 << 20
"""Rows that are turned into parquet at a time: what this takes of memory does not grow with the frame."""
FILES = 300
"""Files whose rows are put together at a time."""
Part = tuple[str, int, Path]
"""A trial's id, its attempt, and the file with its rows."""


def in_parquet(table: Table, columns: Columns) -> pa.Buffer:
    """One trial's columns, with the types of the table; columns that it does not know get those of their values.

    Plain values without statistics: such files are small, written between trials and read whole.
    """
    types = _types(table)
    arrays = {name: pa.array(values, type=types.get(name)) for name, values in columns.items()}
    file = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), file, use_dictionary=False, write_statistics=False, store_schema=False)
    return file.getvalue()


@cache
def _types(table: Table) -> dict[str, pa.DataType]:
    return {column.name: ARROW[column.dtype] for column in table.columns}


def gather(table: Table, parts: Sequence[Part]) -> pd.DataFrame:
    """The rows of all files under each other as a frame of the table.

    Column by column, each to its final type, so that millions of steps are held once.
    """
    if not parts:
        return table.frame([])
    rows, counts = _joined(table, [path for _, _, path in parts])
    dtypes = {column.name: column.dtype for column in table.columns}
    columns: dict[str, Any] = {}
    for name in rows.column_names:
        values = rows.column(name).to_pandas()
        rows = rows.drop_columns([name])
        pa.default_memory_pool().release_unused()
        columns[name] = values.astype(dtypes[name]) if name in dtypes else values
    columns["trial_id"] = pd.array([trial_id for trial_id, _, _ in parts], dtype="string").repeat(counts)
    columns["attempt"] = pd.array([attempt for _, attempt, _ in parts], dtype="Int64").repeat(counts)
    return table.typed(pd.DataFrame(columns, copy=False))


def _joined(table: Table, paths: Sequence[Path]) -> tuple[pa.Table, list[int]]:
    """The rows of all files, and how many each has; in few large pieces, which can be given back one by one."""
    counts, pieces = [], []
    for start in range(0, len(paths), FILES):
        begin_reading(paths[start : start + FILES])
        read = [read_table(path, table) for path in paths[start : start + FILES]]
        counts += [part.num_rows for part in read]
        pieces.append(pa.concat_tables(read, promote_options="permissive").combine_chunks())
    return pa.concat_tables(pieces, promote_options="permissive"), counts


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """A whole frame; pandas reads it back with its types."""
    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    alike = [field.name for field in schema if not pa.types.is_floating(field.type)]
    with pq.ParquetWriter(path, schema, use_dictionary=alike) as writer:
        for start in range(0, len(frame), ROWS):
            part = frame.iloc[start : start + ROWS]
            writer.write_table(pa.Table.from_pandas(part, schema=schema, preserve_index=False))
