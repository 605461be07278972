"""Text from a folder: which files, in which order, how much, which of it is held out."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from harness.errors import WorkloadError
from harness.train.workloads.datasets import STDLIB, read_texts


def write(folder: Path, **texts: bytes) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def test_the_standard_library_is_always_there_and_the_same() -> None:
    train, held = read_texts(STDLIB, 300_000)
    assert sum(map(len, train + held)) == 300_000
    assert 15_000 <= sum(map(len, held)) <= 30_000
    assert b"import " in train[0] + train[1] + train[2]
    read_texts.cache_clear()
    assert read_texts(STDLIB, 300_000) == (train, held)


def test_files_are_read_by_name_and_folders_after_them(tmp_path: Path) -> None:
    write(tmp_path, b=b"second", a=b"first", c__d=b"third", c__a=b"fourth")
    train, held = read_texts(str(tmp_path), 1000)
    assert [one + two for one, two in zip(train, held, strict=True)] == [b"first", b"second", b"fourth", b"third"]
    train, held = read_texts(str(tmp_path), 8)
    assert [one + two for one, two in zip(train, held, strict=True)] == [b"first", b"sec"], "no more than asked for"


def test_binary_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, text=b"some words", empty=b"", binary=b"\x7fELF\0\0", **{".hidden": b"secret"})
    write(tmp_path, **{".git__config": b"[core]", "__pycache____x": b"cached"})
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "module.txt").write_bytes(b"cached")
    train, held = read_texts(str(tmp_path), 1000)
    assert b"".join(train + held) == b"some words"


def test_of_many_files_whole_ones_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{number:02}": str(number % 10).encode() * 50 for number in range(40)})
    train, held = read_texts(str(tmp_path), 10_000)
    assert (len(train), len(held)) == (36, 4)
    assert held[0] == b"9" * 50 and all(len(text) == 50 for text in train + held)


def test_of_few_files_the_end_of_each_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, a=b"a" * 95 + b"b" * 5, b=b"c" * 20)
    assert read_texts(str(tmp_path), 1000) == ((b"a" * 90, b"c" * 18), (b"a" * 5 + b"b" * 5, b"cc"))


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_not_there_or_empty(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "texts"
    if made:
        folder.mkdir()
    message = "no file with text in" if made else "is no folder on this node; give a folder of text files"
    with pytest.raises(WorkloadError) as caught:
        read_texts(str(folder), 1000)
    assert str(caught.value).startswith(f"data {folder}: ") and message in str(caught.value)


def test_a_python_without_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(WorkloadError, match=r"data stdlib: no file with text in .* ends in \.py"):
        read_texts(STDLIB, 999)
