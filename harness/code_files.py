"""The Python files of a folder: what is shipped to a cluster, and by what a workload's code is known again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NOT_CODE = {"__pycache__", "node_modules", "results"}


def python_files(folder: Path) -> Iterator[Path]:
    """All below it, in a fixed order, but those of hidden folders, of results and of virtual environments."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_CODE)
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        found = (Path(here) / name for name in sorted(files) if name.endswith(".py"))
        yield from filter(Path.is_file, found)  # a link may lead nowhere
