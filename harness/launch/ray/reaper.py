"""A small process that outlives a killed driver for a moment, and ends what Ray leaves behind then.

Ray's own agents look for their parent now and then, and wait for a dead server when it is gone: half a minute or more.
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
from harness.system.signals import sigterm_blocked

DONE = b"."
"""What the driver says when it has ended everything itself."""
PAUSE_S, CLEAN, MOST_S = 0.5, 3, 8.0
"""Between two looks; how many in a row must find nobody; the longest it looks."""
GONE_S, SOON_S = 2.0, 0.02
"""How long those that were killed are waited for, and between two looks."""


@contextmanager
def reaper_for(folder: Path) -> Iterator[None]:
    """Should this process die inside, every process that holds a file below the folder is killed."""
    command = [sys.executable, "-m", "harness.launch.ray.reaper", str(folder)]
    # of a session of its own, and deaf: what is sent to the driver and all its children is not for it
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
    """Waits for the driver; where it died without a word, kills who is left until nobody has been there for a while."""
    if sys.stdin.buffer.read(1) == DONE:
        return
    until, clean = time.monotonic() + MOST_S, 0
    while clean < CLEAN and time.monotonic() < until:
        clean = 0 if _kill_holders(folder) else clean + 1
        time.sleep(PAUSE_S)


def end_holders(folder: Path) -> None:
    """Kills every process that holds a file below the folder, and waits until they are gone."""
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
    """The processes, but this one, that were started with the folder in their command or have a file in it open."""
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
