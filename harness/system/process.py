"""This Python process: its end with its parent, garbage collector, Ctrl-C and SIGTERM, variables, threads, steps."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TypeVar

T = TypeVar("T")

INTERRUPTED, UNSETTLED = 130, 5
"""Exit codes of a command that was interrupted; 5: before it settled a trial, so that a resume would repeat it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_S = 0.5
"""Seconds in which a second signal counts as the first: a wrapper may forward the signal of the terminal."""
SHOW_CURSOR = b"\x1b[?25h\n"
MESSAGE = b"\nInterrupted, stopping workers (press Ctrl-C again to quit immediately)\n"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Looked up at import: between fork and exec a process must not load a library."""


def resident_peak() -> int | None:
    """Return the peak resident memory of this process in bytes (Linux); None if the system does not say."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return None


def die_with_parent() -> None:
    """Kill this process when its parent dies (Linux only), where the parent is the thread that started it."""
    if _libc:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Start processes with SIGTERM blocked (Linux only), as Ray starts its own with SIGINT blocked.

    A batch system sends SIGTERM to every process of a job; these are needed until the driver has ended in order.
    """
    if not sys.platform.startswith("linux"):  # elsewhere Ray's reaper ends leftover processes by SIGTERM
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do some work in a thread that ends with the process, unlike an executor's; return its result or error to come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def variables(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set the defaults that the environment lacks, and the fixed variables; restore the environment afterwards."""
    wanted = {**{name: value for name, value in defaults.items() if name not in os.environ}, **fixed}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _State:
    """The state of the main thread, the only thread that signals interrupt."""

    first_at: float | None = None
    held: int = 0
    waiting: bool = False


_state = _State()


@contextmanager
def handle_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM (sent by batch systems); a second ends the process.

    The workers end with the process. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.first_at, _state.waiting = None, False
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        with _listening_thread():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.first_at = None


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _state.first_at is not None:
        if now - _state.first_at > REPEAT_S:
            _exit()
        return
    _state.first_at = now
    with suppress(OSError):  # the same Ctrl-C may have ended the reader of the pipe
        os.write(2, MESSAGE)
    if _state.held:
        _state.waiting = True
        return
    raise KeyboardInterrupt


def _exit() -> None:
    """End the process without clean-up, except for the cursor, which a live display has hidden."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)
    os._exit(INTERRUPTED)


@contextmanager
def _listening_thread() -> Iterator[None]:
    """Receive the signals in a thread too: Python's handlers wait while the main thread runs C++ code of Ray.

    The thread ends with the block: a signal that it handled later would count for whatever comes after.
    """
    heard, woken = socket.socketpair()
    woken.setblocking(False)
    before = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(heard,), daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        woken.close()
        listener.join()


def _listen(heard: socket.socket) -> None:
    """End the process at the second signal; return when the other end of the socket is closed."""
    first_at: float | None = None
    with heard:
        while numbers := heard.recv(64):
            now = time.monotonic()
            if any(number in SIGNALS for number in numbers):
                if first_at is not None and now - first_at > REPEAT_S:
                    _exit()
                first_at = first_at or now


def _detach_child() -> None:
    """Detach a forked child from the socket: its signals are not its parent's."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_detach_child)


def interrupted() -> bool:
    """Return whether the first signal has arrived, so that the rest must end soon."""
    return _state.first_at is not None


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Complete a block before KeyboardInterrupt is raised, so that a record is complete or was never begun."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
        if _state.waiting and not _state.held:
            _state.waiting = False
            raise KeyboardInterrupt


STEPS = struct.Struct("=q")
"""The content of a file in which a process counts its steps."""


@contextmanager
def step_counter(path: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that counts a step of this process in a new file, which is removed afterwards."""
    path.write_bytes(STEPS.pack(0))
    try:
        yield counting_in(path)
    finally:
        path.unlink(missing_ok=True)


def counting_in(path: Path) -> Callable[[], None]:
    """Return a function that counts a step in a file, mapped into memory: 0.1 microseconds, no system call."""
    with path.open("r+b") as file:
        count = memoryview(mmap.mmap(file.fileno(), STEPS.size)).cast("q")

    def advance() -> None:
        count[0] += 1

    return advance


def read_counter(path: Path) -> int | None:
    """Return the number of steps of the counter's process; None if there is no such counter."""
    try:
        return int(STEPS.unpack(path.read_bytes()[: STEPS.size])[0])
    except (OSError, struct.error):
        return None
