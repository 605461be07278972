"""Files that are whole or not there: appended lines and replaced texts, both on disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path


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
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
