"""Scratch folders: private, locked by their process, and removed later if the process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "harness-scratch-"
JUST_MADE_S = 5.0
"""A folder younger than this may not be locked yet."""


class Scratch:
    """A new private folder, which exists until ``close``.

    The process holds a lock on the folder, which the kernel releases when the process ends, also if it is killed;
    forked processes hold it too. systemd-tmpfiles respects such locks.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock: int | None = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: sweep() cannot lock the folder either, and keeps it
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder and its content; further calls do nothing."""
        if self._lock is not None:
            remove(self.path)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def shared_memory() -> Path:
    """Return /dev/shm if it can be written, else the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def remove(folder: Path) -> None:
    """Remove a scratch folder of this user; any other path is kept."""
    if folder.name.startswith(PREFIX) and _is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parents: Iterable[Path] | None = None) -> list[Path]:
    """Remove the scratch folders of killed processes on this machine; return their paths.

    Only scratch folders of this user without a lock are removed: never those of a running process.
    """
    ray_folder = [Path(os.environ["RAY_TMPDIR"])] if os.environ.get("RAY_TMPDIR") else []
    everywhere = [Path("/tmp"), Path(tempfile.gettempdir()), shared_memory(), *ray_folder]
    places = set(everywhere if parents is None else parents)
    left = [folder for place in sorted(places) for folder in place.glob(f"{PREFIX}*") if _is_left_behind(folder)]
    for folder in left:
        remove(folder)
    return left


def _is_ours(folder: Path) -> bool:
    with suppress(OSError):
        facts = folder.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return False


def _is_left_behind(folder: Path) -> bool:
    if not _is_ours(folder):
        return False
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime < JUST_MADE_S:
            return False
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(number)
    return False
