"""Text data: the Python standard library's sources, which are always available, or a folder of text files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from harness.errors import WorkloadError

STDLIB = "stdlib"
HELD_OUT = 10
"""One byte in HELD_OUT is for validation: whole files or, if they are less than half of that, the end of each file."""
SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "dist-packages")
LOOKED_AT = 4096
"""Bytes at the start of a file; a zero among them means that the file is not text."""

Texts = tuple[tuple[bytes, ...], tuple[bytes, ...]]


@lru_cache(maxsize=4)
def read_texts(data: str, most_bytes: int) -> Texts:
    """Return training and validation texts: the standard library's Python files, or a folder's text files.

    In the order of their paths, without hidden ones, until there are ``most_bytes``: the same on every machine with
    the same files. Raises WorkloadError if there is nothing to read.
    """
    root = Path(sysconfig.get_path("stdlib") if data == STDLIB else data)
    if not root.is_dir():
        raise WorkloadError(f"data {data}: {root} is no folder on this node; give a folder of text files")
    suffix = ".py" if data == STDLIB else ""
    texts, left = [], most_bytes
    try:
        for path in _paths(root, suffix):
            with path.open("rb") as file:
                text = file.read(left)
            if text and b"\0" not in text[:LOOKED_AT]:
                texts.append(text)
                left -= len(text)
            if not left:
                break
    except OSError as error:
        raise WorkloadError(f"data {data}: {type(error).__name__}: {error}") from error
    if not texts:
        raise WorkloadError(f"data {data}: no file with text in {root}{' ends in ' + suffix if suffix else ''}")
    return _split(texts)


def _paths(root: Path, suffix: str) -> Iterator[Path]:
    """Yield the files below a folder by name, a folder's own files before those of its subfolders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _split(texts: list[bytes]) -> Texts:
    """Hold out a file if, with it, no more than one byte in HELD_OUT so far is held out."""
    train: list[bytes] = []
    held: list[bytes] = []
    seen = held_bytes = 0
    for text in texts:
        seen += len(text)
        if (held_bytes + len(text)) * HELD_OUT <= seen:
            held.append(text)
            held_bytes += len(text)
        else:
            train.append(text)
    return (tuple(train), tuple(held)) if 2 * held_bytes * HELD_OUT >= seen else _ends(texts)


def _ends(texts: list[bytes]) -> Texts:
    cuts = [len(text) - len(text) // HELD_OUT for text in texts]
    parts = list(zip(texts, cuts, strict=True))
    return tuple(text[:cut] for text, cut in parts), tuple(text[cut:] for text, cut in parts)
