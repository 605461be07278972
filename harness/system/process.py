"""Processes that end when the one that started them dies, however it dies. Linux only; others must notice it."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Looked up here: between fork and exec there is no room for that."""


def die_with_parent() -> None:
    """From now on the system kills this process when the thread that started it ends; no poll, no time lost."""
    if _libc:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector does not run inside; it is as it was afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
