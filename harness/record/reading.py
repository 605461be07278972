"""Readers of untrusted run folders: text and JSON. No content is executed; every error names its file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic_core import PydanticSerializationError, from_json, to_json

from harness.errors import RunFolderError


def check_no_links(folder: Path) -> None:
    """Raise RunFolderError if a folder holds anything but regular files and folders: a link may lead outside it."""
    with naming_file(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_no_links(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise RunFolderError(
                    f"{entry.path}: is a link, or not a regular file; a run folder holds only regular files: remove it"
                )


def find_run_folders(folder: Path) -> list[Path]:
    """Return the run folders below a folder, itself among them, by path; links are not followed."""
    found = []
    for here, folders, files in os.walk(folder):
        if {"plan.json", "experiment.resolved.yaml"} <= set(files):
            found.append(Path(here))
            folders.clear()
    return sorted(found)


def read_text(path: Path, most: int) -> str:
    """Return the text of a file of at most ``most`` bytes; raises RunFolderError."""
    with naming_file(path):
        if path.stat().st_size > most:
            raise ValueError(f"{path.stat().st_size} bytes; at most {most} are allowed")
        return path.read_text(encoding="utf-8")


def read_object(path: Path, *, lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a file's JSON object; each key in ``lists`` is absent or a list of objects. Raises RunFolderError."""
    with naming_file(path):
        content = object_of(path.read_bytes())
        for key in lists:
            _check_objects(content.get(key, []), key)
        return content


@contextmanager
def naming_file(path: Path, part: str = "") -> Iterator[None]:
    """Convert exceptions raised in the block to a RunFolderError that names the file, and ``part`` of it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, pa.ArrowException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]
        cause = f"{type(error).__name__}: {reason}"
        raise RunFolderError(f"{path}: {part}is damaged or incomplete ({cause})") from error


def object_of(data: bytes) -> dict[str, Any]:
    content = decode_json(data)
    if not isinstance(content, dict):
        raise TypeError(f"expected a JSON object, got {type(content).__name__}")
    return content


def _check_objects(value: object, name: str) -> None:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TypeError(f"{name}: expected a list of objects")


def encode_json(value: object) -> str:
    """Return a value as one line of JSON, with NaN and Infinity as in Python's json; may raise TypeError."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # a lone surrogate, for example, which JSON can hold and UTF-8 cannot
        return json.dumps(value)


def decode_json(data: bytes) -> object:
    """Return the value of a JSON text, with ``?`` for each lone surrogate, which no table can hold.

    Raises ValueError, or RecursionError.
    """
    try:
        return from_json(data)
    except ValueError:
        content = json.loads(data)
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
