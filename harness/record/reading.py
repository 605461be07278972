"""Reads what anyone may have written: JSON, lines of JSON, Parquet. Nothing runs, each problem names its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.errors import RunFolderError
from harness.record import json_text


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


def _check_objects(value: Any, name: str) -> None:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TypeError(f"{name}: expected a list of objects")
