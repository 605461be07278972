"""Atomic writes: appended lines and replaced files, both on disk when the call returns; the lock of a folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import RunFolderError, WriteError, cause_of

PACKAGE_FOLDER = Path(__file__).parents[1]
"""The folder of the source of this package."""
PARTIAL = ".partial"
"""The suffix of a file until it is complete; a crash may leave such a file behind."""
NOT_CODE = {"__pycache__", "node_modules", "results"}
_CHUNK = 4096
to_disk: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
"""Wait until the data of an open file is on disk, and the metadata that is needed to read it."""


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append all lines or none, and wait until they are on disk; raises WriteError.

    A last line without a newline, cut short by a crash, is removed first: it was never counted, and its trial may have
    been measured again.
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
    """Replace the content of a file atomically; raises WriteError."""
    replace_all([(path, text.encode("utf-8", errors="backslashreplace"))])


def replace_all(contents: Iterable[tuple[Path, bytes | memoryview]]) -> None:
    """Replace several files, each atomically."""
    with contextlib.ExitStack() as stack:
        files = []
        for path, data in contents:
            partial = stack.enter_context(_in_place_of(path))
            files.append(stack.enter_context(partial.open("wb", buffering=0)))
            _write(files[-1], data)
        for file in files:
            to_disk(file.fileno())


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files that are no longer needed; errors of the system are ignored."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path`` to write to; it replaces ``path`` at the end of the block. Raises WriteError."""
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
            with contextlib.suppress(OSError):  # the disk may be full: free its space
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk or a read-only folder, into a WriteError."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path}: cannot be written: {error.strerror or error}. What was recorded before is kept and whole; "
            "make room, or make the folder writable"
        ) from error


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _end_of_lines(file: io.FileIO) -> tuple[int, int]:
    """Return the offset after the last complete line, and the size of the file; reads backwards from its end."""
    size = file.seek(0, os.SEEK_END)
    start, tail = size, b""
    while start and b"\n" not in tail:
        step = 1 if start == size else min(_CHUNK, start)  # nearly always the last byte is a newline
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    return start + tail.rfind(b"\n") + 1, size


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder; raises RunFolderError if another run holds it.

    The system releases the lock when the process ends, also if it is killed.
    """
    lock, holder = FileLock(folder / ".lock"), folder / ".lock-holder"
    try:
        lock.acquire(timeout=0)
        replace_text(holder, f"pid {os.getpid()} on {platform.node()}")
    except Timeout:
        named = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            named = f" ({holder.read_text(encoding='utf-8')[:200]})"
        raise RunFolderError(f"{folder}: another run is writing into this folder{named}") from None
    except (OSError, WriteError) as error:
        lock.release()
        raise RunFolderError(f"{folder}: the folder cannot be written: {cause_of(error)}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder in a fixed order, without hidden folders, results, virtual environments."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_CODE)
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        found = (Path(here) / name for name in sorted(files) if name.endswith(".py"))
        yield from filter(Path.is_file, found)  # a link may be broken


def code_hash(*folders: Path, most: int | None = None) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of the Python files below folders, with their paths in these.

    A file that cannot be read, and so not be imported either, counts as empty. ``most``: the maximum number of files of
    a folder.
    """
    content = hashlib.sha256()
    for folder in folders:
        for file in islice(python_files(folder), most):
            name, data = file.relative_to(folder).as_posix(), b""
            with contextlib.suppress(OSError):
                data = file.read_bytes()
            content.update(f"{name}\0{len(data)}\0".encode(errors="surrogateescape") + data)
    return content.hexdigest()[:12]


def package_version(name: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
