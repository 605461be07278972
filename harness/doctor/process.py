"""What a process runs beside its main thread: computing threads, Python threads, processes."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import psutil
import torch

HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker", "compile_worker")
"""Processes that Python and torch start for their own purposes."""
LIBRARIES = ("/site-packages/", str(Path(__file__).parents[1]) + "/")
"""Parts of the paths of libraries and of the harness: what runs their code was started by them."""

STANDARD = "/lib/python"
"""A part of the path of every file of the standard library, and of libraries."""


@dataclass(frozen=True)
class ProcessState:
    """The number of computing threads, and the Python threads and child processes by identity and name."""

    threads: int
    others: dict[int, str]

    @classmethod
    def now(cls) -> ProcessState:
        """Read the state of this process."""
        frames = sys._current_frames()
        running = {
            id(thread): f"thread {thread.name}"
            for thread in threading.enumerate()
            if not _is_a_librarys(frames.get(thread.ident or 0))
        }
        return cls(torch.get_num_threads(), running | _children())

    def started_since(self, earlier: ProcessState) -> list[str]:
        """Return the names of the threads and processes that were not there before."""
        return [name for key, name in self.others.items() if key not in earlier.others]


def processors() -> int:
    """Return the number of processors that this process may use."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None  # macOS has none
    return len(allowed) if allowed else psutil.cpu_count() or 1


def _is_a_librarys(frame: FrameType | None) -> bool:
    """Return whether the outermost code of a thread, the standard library's left out, is a library's."""
    files = [frame.f_code.co_filename for frame, _ in walk_stack(frame)] if frame else []
    outside = [file for file in reversed(files) if STANDARD not in file or "/site-packages/" in file]
    return bool(outside) and any(part in outside[0] for part in LIBRARIES)


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children():
        try:
            if not any(helper in part for helper in HELPERS for part in child.cmdline()):
                found[-child.pid] = f"process {child.name()}"
        except psutil.Error:  # it has ended
            continue
    return found
