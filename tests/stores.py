"""Stores for tests: folders as pyarrow sees them, and one that fails as a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import StoreError
from harness.record.mirror import newest_writer, read_claims, read_lines_of
from harness.record.store import Store, open_store


def folder_store(folder: Path) -> Store:
    return open_store(f"file://{folder}")


def lines_in(store: Store, run: str) -> list[str]:
    """The lines of a run in a store that count."""
    return [line.text for line in read_lines_of(store, run, newest_writer(store, run, read_claims(store, run)))]


@dataclass(frozen=True)
class Watched(Store):
    """Calls ``before`` with the name of each object that is to be written; what it raises, the write raises."""

    before: Callable[[str], None] = lambda name: None
    names: list[str] = field(default_factory=list)

    def put(self, name: str, content: bytes) -> None:
        self.before(name)
        super().put(name, content)
        self.names.append(name)


def watched(folder: Path, before: Callable[[str], None] = lambda name: None) -> Watched:
    store = folder_store(folder)
    return Watched(store.filesystem, store.root, store.address, before)


class Failing:
    """A ``before`` that fails while ``on``, and ``says`` so."""

    def __init__(self) -> None:
        self.on, self.says = False, "the store does not answer"
        self.calls = 0

    def __call__(self, name: str) -> None:
        self.calls += 1
        if self.on:
            raise StoreError(self.says)
