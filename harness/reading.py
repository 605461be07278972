"""Reads what anyone may have written: JSON, lines of JSON, Parquet. Nothing runs, each problem names its file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness import json_text
from harness.errors import RunFolderError
from harness.schema import TRIALS, WINDOWS, Table

MAX_ROWS = 100_000_000
_HEADS = (b'{"trial_id":"', b'{"trial_id": "')
"""How every line begins, today and earlier, and so what is left of one that a crash cut short."""
_TRIAL_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NEEDED = ("attempt", "cell_id", "kind", "purpose", "block", "sitting", "outcome", "strategy", "devices")
_WINDOW = ("rank", "window", "window_kind", "duration_s", "steps", "weight")
_DTYPES = {column.name: column.dtype for table in (WINDOWS, TRIALS) for column in table.columns}
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "Int64": (int,),
    "Float64": (float, int),
    "boolean": (bool,),
}
_ARROW: Mapping[str, Callable[[pa.DataType], bool]] = {
    "string": lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    "Int64": pa.types.is_integer,
    "Float64": lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind),
    "boolean": pa.types.is_boolean,
}


def refuse_links(folder: Path) -> None:
    """Raises RunFolderError where a folder holds what is neither file nor folder: a link may lead anywhere."""
    with naming(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise RunFolderError(f"{entry.path}: is a link, or no regular file; a run folder has none, remove it")


def read_text(path: Path, most: int) -> str:
    """A text file of at most so many bytes; raises RunFolderError."""
    with naming(path):
        if path.stat().st_size > most:
            raise ValueError(f"larger than {most} bytes")
        return path.read_text(encoding="utf-8")


def read_object(path: Path, *, lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """A file's JSON object; those of its keys that are to be lists of objects are. Raises RunFolderError."""
    with naming(path):
        content = _object(path.read_bytes())
        for key in lists:
            _check_objects(content.get(key, []), key)
        return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The recorded trials in a file, brought up to today's version; raises RunFolderError.

    What a crash cut short does not count: the rest after the last newline, or a line that was ended later.
    """
    with naming(path):
        *lines, rest = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        with naming(path, f"line {number} "):
            try:
                row = _object(line)
            except (ValueError, RecursionError):
                if _torn(line):
                    continue
                raise
            rows.append(_checked(_upgraded(row)))
    if not _torn(rest):
        raise RunFolderError(f"{path}: is damaged or incomplete: it does not end with a recorded trial")
    return rows


def read_table(path: Path, table: Table) -> pa.Table:
    """A Parquet file with numbers, flags and texts in the columns of a table; raises RunFolderError."""
    # as a file of the system, and without a thread for each: most are small
    with naming(path), pa.OSFile(str(path)) as source, pq.ParquetFile(source, pre_buffer=False) as file:
        if file.metadata.num_rows > MAX_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows; at most {MAX_ROWS} are read")
        content = file.read(use_threads=False)  # half the time of pq.read_table
        _check_columns(content.schema, table)
        return content.replace_schema_metadata(None)  # what pandas is told there is not needed


@contextmanager
def naming(path: Path, part: str = "") -> Iterator[None]:
    """Whatever goes wrong inside is a RunFolderError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, pa.ArrowException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]
        said = f"{type(error).__name__}: {reason}"
        raise RunFolderError(f"{path}: {part}is damaged or incomplete ({said})") from error


def _object(data: bytes) -> dict[str, Any]:
    content = json_text.decode(data)
    if not isinstance(content, dict):
        raise TypeError(f"expected a JSON object, got a {type(content).__name__}")
    return content


def _torn(line: bytes) -> bool:
    """Whether a line is the beginning of one, or nothing: some file systems leave zeros for what was not written."""
    written = line.rstrip(b"\0")
    return any(head.startswith(written[: len(head)]) for head in _HEADS)


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """A line of an older version with what it lacks, so that old run folders can be read."""
    if "purpose" not in line:
        later = {"purpose": "", "check_id": None, "alone_id": None, "wrapped_id": None, "launcher": "ray"}
        line = {**later, "facts": {}, "parts": {}, **line}
        for window in line["windows"]:
            window["window_kind"] = "warmup" if window.pop("warmup") else "timed"
    return line


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """The line of a trial, if its values are of the types of their columns; raises TypeError or ValueError."""
    if not (isinstance(line.get("trial_id"), str) and _TRIAL_ID.fullmatch(line["trial_id"])):
        raise ValueError(f"trial_id: got {str(line.get('trial_id'))[:40]!r}")
    _check_values(line, _NEEDED)
    for key in ("windows", "ranks"):
        _check_objects(line[key], key)
    for key in ("facts", "parts"):
        if not isinstance(line[key], dict):
            raise TypeError(f"{key}: expected an object, got a {type(line[key]).__name__}")
    for window in line["windows"]:
        _check_values(window, _WINDOW)
    return line


def _check_values(row: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    for name in _whole(tuple(row), tuple(map(type, row.values())), needed):
        if not -(2**63) <= row[name] < 2**63:
            raise ValueError(f"{name}: a number of more than 64 bits")


@lru_cache(maxsize=1024)
def _whole(names: tuple[str, ...], types: tuple[type, ...], needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the names have whole numbers; raises where a type is not its column's. A run has few kinds of rows."""
    found = {name: kind for name, kind in zip(names, types, strict=True) if kind is not NoneType}
    for name, kind in found.items():
        if name in _DTYPES and kind not in _PYTHON[_DTYPES[name]]:
            raise TypeError(f"{name}: expected {_DTYPES[name]}, got a {kind.__name__}")
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{missing[0]} is missing")
    return tuple(name for name, kind in found.items() if kind is int)


def _check_objects(value: Any, name: str) -> None:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TypeError(f"{name}: expected a list of objects")


def _check_columns(schema: pa.Schema, table: Table) -> None:
    first = table.columns[2].name  # after the trial and its attempt, which the files of single trials lack
    if first not in schema.names:
        raise ValueError(f"no column {first!r}: not the table {table.name}")
    dtypes = {column.name: column.dtype for column in table.columns}
    for field in schema:
        allowed = [_ARROW[dtypes[field.name]]] if field.name in dtypes else list(_ARROW.values())
        if not pa.types.is_null(field.type) and not any(is_kind(field.type) for is_kind in allowed):
            raise TypeError(f"column {field.name[:40]!r} is of type {str(field.type)[:40]}")
