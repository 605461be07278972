"""Appended lines and replaced files, when the system refuses to write or a crash cut a line short."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.errors import WriteError
from harness.system import files
from harness.system.files import append_lines, code_hash, replace_all, replace_text, replacing

LIMIT = 10_000


@contextmanager
def small_files() -> Iterator[None]:
    """Inside, no file may grow beyond LIMIT bytes: a real limit of the system, which stops root too.

    Not for longer than a write: what the tests print may go to a larger file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("torn", ["x", '{"whole": 1}', "y" * 10_000])
def test_a_line_cut_short_goes_before_the_next_comes(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    append_lines(path, ["one"])
    with path.open("a") as file:
        file.write(torn)
    append_lines(path, ["two"])
    assert path.read_text() == "one\ntwo\n"
    path.write_text(torn)
    append_lines(path, ["one"])
    assert path.read_text() == "one\n"


def test_lines_come_together_or_not_at_all_and_a_line_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_lines(path, ["one", "a" * 6_000])
    output = r"lines: cannot be written: File too large. What was recorded before is kept"
    for lines in (["b" * 6_000], ["three", "f" * LIMIT]):
        with small_files(), pytest.raises(WriteError, match=output):
            append_lines(path, lines)
        append_lines(path, [])
        assert path.read_text() == "one\n" + "a" * 6_000 + "\n"
    append_lines(path, ["c"])
    assert path.read_text().endswith("a\nc\n")


def test_of_files_that_go_together_none_is_half_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    replace_all([(one, b"1"), (two, memoryview(b"2"))])
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")
    with small_files(), pytest.raises(WriteError, match="two: cannot be written: File too large"):
        replace_all([(one, b"11"), (two, b"2" * (LIMIT + 1))])
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "two"]


def test_files_and_lines_are_on_disk_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = files.to_disk, os.replace
    monkeypatch.setattr(files, "to_disk", lambda number: (done.append("sync"), sync(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(Path(b).name), replace(a, b)))
    replace_all([(tmp_path / "one", b"1"), (tmp_path / "two", b"2")])
    assert done[:2] == ["sync", "sync"] and sorted(done[2:]) == ["one", "two"]
    append_lines(tmp_path / "lines", ["one", "two"])
    assert done[4:] == ["sync"]


def test_a_text_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "text"
    replace_text(path, "before")
    with small_files(), pytest.raises(WriteError, match="File too large"):
        replace_text(path, "x" * (LIMIT + 1))
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["text"]


def test_an_error_inside_the_block_is_no_write_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "text") as partial:
        partial.write_text(str(1 / 0))
    assert not (tmp_path / "text").exists()


def test_a_file_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1")
    before = code_hash(tmp_path)
    (tmp_path / "b.py").symlink_to("/proc/self/mem")
    with_link = code_hash(tmp_path)
    (tmp_path / "b.py").unlink()
    (tmp_path / "b.py").write_text("")
    assert before != with_link == code_hash(tmp_path)
