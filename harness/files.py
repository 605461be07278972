"""Files that are whole or not there: appended lines and replaced texts, both on disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def append_line(path: Path, line: str) -> None:
    """Appends one line and waits until it is on disk. A line that a crash cut short is ended first."""
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: Buffer) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
