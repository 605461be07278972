"""The reaper: a process that outlives a killed driver by seconds, and kills the processes that Ray leaves behind.

Ray's own agents check for their parent only every few seconds, and wait for a dead server half a minute or more.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.system.files import PACKAGE_FOLDER
from harness.system.process import sigterm_blocked

DONE = b"."
"""Sent by the driver when it has ended all processes itself."""
PAUSE_S, CLEAN, MOST_S = 0.5, 3, 8.0
"""The pause between two searches; how many in a row must find no process; the longest time of searching."""
GONE_S, SOON_S = 2.0, 0.02
"""The timeout for killed processes to end, and the pause between two checks."""


@contextmanager
def reaper_for(folder: Path) -> Iterator[None]:
    """If this process dies inside, kill every process that holds a file below the folder."""
    command = [sys.executable, "-m", "harness.launch.ray.reaper", str(folder)]
    # in a session of its own, SIGTERM blocked: a signal to the driver and all its children must not end it
    with sigterm_blocked():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=PACKAGE_FOLDER.parent)
    with process as guard:
        assert guard.stdin
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                guard.stdin.write(DONE)
                guard.stdin.close()


def watch(folder: Path) -> None:
    """Wait for the driver; if it died without DONE, kill holders until several searches in a row find none."""
    if sys.stdin.buffer.read(1) == DONE:
        return
    until, clean = time.monotonic() + MOST_S, 0
    while clean < CLEAN and time.monotonic() < until:
        clean = 0 if _kill_holders(folder) else clean + 1
        time.sleep(PAUSE_S)


def end_holders(folder: Path) -> None:
    """Kill every process that holds a file below the folder, and wait until they are gone."""
    until = time.monotonic() + GONE_S
    while _kill_holders(folder) and time.monotonic() < until:
        time.sleep(SOON_S)


def _kill_holders(folder: Path) -> int:
    found = list(holders(folder))
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)


def holders(folder: Path) -> Iterator[psutil.Process]:
    """Yield the other processes with the folder in their command line or with an open file below it."""
    inside = str(folder)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == psutil.Process().pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            named = any(inside in part for part in process.cmdline())
            if named or any(file.path.startswith(inside) for file in process.open_files()):
                yield process


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
