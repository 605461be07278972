"""One run at a time writes into a folder."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import RunFolderError, WriteError, cause_of
from harness.files import replace_text


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other run writes into the folder; raises RunFolderError where another does.

    The system holds the lock for a process and gives it back when that dies, however it dies.
    """
    lock, holder = FileLock(folder / ".lock"), folder / ".lock-holder"
    try:
        lock.acquire(timeout=0)
        replace_text(holder, f"pid {os.getpid()} on {platform.node()}")
    except Timeout:
        raise RunFolderError(f"{folder}: another run is writing into this folder{_named(holder)}") from None
    except (OSError, WriteError) as error:
        lock.release()
        raise RunFolderError(f"{folder}: the folder cannot be written: {cause_of(error)}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def _named(holder: Path) -> str:
    """Who holds the lock, where that can be told: ' (pid 123 on some-host)'."""
    try:
        return f" ({holder.read_text(encoding='utf-8')[:200]})"
    except (OSError, UnicodeDecodeError):
        return ""
