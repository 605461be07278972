"""Ctrl-C and SIGTERM: the first ends a run in order, a second at once; what is being recorded is finished first."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
def handle_signals() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, raises KeyboardInterrupt as Ctrl-C does; a second signal ends the process.

    Its workers end then too: they do not outlive the driver. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.first_at, _state.waiting = None, False
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        with _heard_at_once():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.first_at = None


@contextmanager
def _heard_at_once() -> Iterator[None]:
    """A thread hears the signals too: Python's own handlers wait for as long as the main thread is in Ray's C++."""
    heard, woken = socket.socketpair()
    woken.setblocking(False)
    before = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        woken.close()


def _listen(heard: socket.socket) -> None:
    """Ends the process at the second signal; itself, when the other end is closed."""
    first_at: float | None = None
    with heard:
        while numbers := heard.recv(64):
            now = time.monotonic()
            if any(number in SIGNALS for number in numbers):
                if first_at is not None and now - first_at > REPEAT_S:
                    _exit()
                first_at = first_at or now


def _forget() -> None:
    """What a forked child is sent is not for its parent."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


def interrupted() -> bool:
    """Whether the first signal has come: what ends from now on has little time."""
    return _state.first_at is not None


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Lets a block finish before an interruption is raised: a record is whole, or was never begun."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
        if _state.waiting and not _state.held:
            _state.waiting = False
            raise KeyboardInterrupt


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Processes that are started inside do not hear SIGTERM, as Ray sees to for SIGINT. On Linux.

    A batch system sends it to every process of a job; these are needed until the driver has ended in order.
    """
    if not sys.platform.startswith("linux"):  # Ray's reaper there ends what is left by SIGTERM
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _state.first_at is not None:
        if now - _state.first_at > REPEAT_S:
            _exit()
        return
    _state.first_at = now
    with suppress(OSError):  # a pipe whose reader the same Ctrl-C has ended
        os.write(2, TOLD)
    if _state.held:
        _state.waiting = True
        return
    raise KeyboardInterrupt


def _exit() -> None:
    """Without a look back; only a live display has hidden the cursor."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)
    os._exit(INTERRUPTED)
