"""Settings of this Python process: its end with its parent, and its garbage collector."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Looked up at import: between fork and exec a process must not load a library."""


def die_with_parent() -> None:
    """Kill this process when its parent dies (Linux only), where the parent is the thread that started it."""
    if _libc:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector for a block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
