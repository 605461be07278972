"""Files that are whole or not there: appended lines and replaced texts, both on disk when the call returns."""

from __future__ import annotations

import contextlib
import io
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import RunFolderError, WriteError, cause_of

PACKAGE_FOLDER = Path(__file__).parents[1]
"""Where the source of this package lies."""
PARTIAL = ".partial"
"""What a file is called until it is whole; a crash may leave one behind."""
_CHUNK = 4096
_SYNC = getattr(os, "fdatasync", os.fsync)  # not everywhere


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Appends lines and waits until they are on disk, all or none; raises WriteError.

    A line that a crash cut short goes first: it was never counted, so it must not count now, for what it tells may
    have been measured again.
    """
    if not lines:
        return
    with writing(path), path.open("a+b", buffering=0) as file:
        end, size = _end_of_lines(file)
        if end < size:
            file.truncate(end)
        try:
            _write(file, "".join(f"{line}\n" for line in lines).encode())
            to_disk(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; raises WriteError."""
    replace_all([(path, text.encode("utf-8", errors="backslashreplace"))])


def replace_all(contents: Iterable[tuple[Path, bytes | memoryview]]) -> None:
    """The same of several files, which wait for the disk together: that takes less time than one after the other."""
    with contextlib.ExitStack() as stack:
        files = []
        for path, data in contents:
            partial = stack.enter_context(_in_place_of(path))
            files.append(stack.enter_context(partial.open("wb", buffering=0)))
            _write(files[-1], data)
        for file in files if len(files) > 1 else ():
            _begin_writing(file.fileno())
        for file in files:
            to_disk(file.fileno())


def remove_all(paths: Iterable[Path]) -> None:
    """Removes files, as far as the system lets it: none of them is needed."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def begin_reading(paths: Iterable[Path]) -> None:
    """Lets the system read small files without waiting for them, so that they are there when their turn comes."""
    for path in paths if hasattr(os, "posix_fadvise") else ():  # not on macOS
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``, which takes its place, on disk, at the end of the block; raises WriteError."""
    with _in_place_of(path) as partial:
        yield partial
        with partial.open("rb") as file:
            to_disk(file.fileno())


@contextlib.contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    partial = Path(f"{path}{PARTIAL}")
    with writing(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):  # on a full disk it takes the room that others need
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises WriteError where the system refuses to write: a full disk, a folder that became read-only."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path}: cannot be written: {error.strerror or error}. What was recorded before is kept and whole; "
            "make room, or make the folder writable"
        ) from error


def to_disk(number: int) -> None:
    """Waits until what was written to an open file is on disk, with as much of its inode as reading it needs."""
    _SYNC(number)


def _begin_writing(number: int) -> None:
    """Lets the system write an open file's data without waiting for it.

    The first wait is then for all files that were begun, since they share the file system's journal, and the others
    are short. PostgreSQL begins writing in this way where it has no better one (pg_flush_data in its fd.c).
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with contextlib.suppress(OSError):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _end_of_lines(file: io.FileIO) -> tuple[int, int]:
    """Where the last whole line ends, and the file; looks at no more than what follows that line."""
    size = file.seek(0, os.SEEK_END)
    start, tail = size, b""
    while start and b"\n" not in tail:
        step = 1 if start == size else min(_CHUNK, start)  # nearly always the last byte tells
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    return start + tail.rfind(b"\n") + 1, size


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


NOT_CODE = {"__pycache__", "node_modules", "results"}


def python_files(folder: Path) -> Iterator[Path]:
    """All below it, in a fixed order, but those of hidden folders, of results and of virtual environments."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_CODE)
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        found = (Path(here) / name for name in sorted(files) if name.endswith(".py"))
        yield from filter(Path.is_file, found)  # a link may lead nowhere
