"""Ctrl-C and SIGTERM: the first ends a run in order, a second at once; what is being recorded is finished first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130
REPEAT_S = 0.5
"""A wrapper may hand on the signal that the terminal has sent to both: so soon, a second one is the first."""
SHOW_CURSOR = b"\x1b[?25h\n"
TOLD = b"\ninterrupted: ending what runs; once more exits at once\n"


@dataclass
class _State:
    """Of the one main thread that signals interrupt."""

    first_at: float | None = None
    held: int = 0
    waiting: bool = False


_state = _State()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, raises KeyboardInterrupt as Ctrl-C does; a second signal ends the process.

    Its workers end then too: they do not outlive the driver. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.first_at, _state.waiting = None, False
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.first_at = None


def interrupted() -> bool:
    """Whether the first signal has come: what ends from now on has little time."""
    return _state.first_at is not None


@contextmanager
def held() -> Iterator[None]:
    """Lets a block finish before an interruption is raised: a record is whole, or was never begun."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
        if _state.waiting and not _state.held:
            _state.waiting = False
            raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _state.first_at is not None:
        if now - _state.first_at > REPEAT_S:
            _exit()
        return
    _state.first_at = now
    os.write(2, TOLD)
    if _state.held:
        _state.waiting = True
        return
    raise KeyboardInterrupt


def _exit() -> None:
    """Without a look back; only a live display has hidden the cursor."""
    if os.isatty(1):
        os.write(1, SHOW_CURSOR)
    os._exit(INTERRUPTED)
