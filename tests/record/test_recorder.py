"""The recorder thread: records in order, batched while the disk is busy, reported only once on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from harness.errors import WriteError
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.record.recorder import MOST, Recorder
from harness.record.rows import Record

SOON_S = 30.0


class Disk:
    """A fake run folder whose writes wait for an event; it keeps the names of each batch."""

    def __init__(self, fails_at: str = "") -> None:
        self.free, self.asked = threading.Event(), threading.Semaphore(0)
        self.together: list[list[str]] = []
        self._fails_at = fails_at

    def append_all(self, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
        self.asked.release()
        assert self.free.wait(SOON_S)
        names = [record.result.trial_id for record in records]
        self.together.append(names)
        for name in names:
            if name == self._fails_at:
                raise WriteError("full")
            yield {"trial_id": name}


def recorder(disk: Disk) -> Recorder:
    return Recorder(cast(RunFolder, disk))


def record(name: str) -> Record:
    return Record(cast(Any, None), TrialResult(name, "ok"), {})


def names(written: Sequence[tuple[Record, dict[str, Any]]]) -> list[str]:
    assert all(record.result.trial_id == line["trial_id"] for record, line in written)
    return [line["trial_id"] for _, line in written]


def test_records_queued_while_the_disk_is_busy_are_written_together_in_order() -> None:
    disk = Disk()
    with recorder(disk) as beside:
        beside.put(record("a"))
        assert disk.asked.acquire(timeout=SOON_S)
        for name in "bcd":
            beside.put(record(name))
        assert beside.written(0.0) == [], "only records on disk are returned"
        disk.free.set()
        assert names(beside.written(None)) == ["a", "b", "c", "d"]
        assert beside.written(None) == [], "each record is returned once"
    assert disk.together == [["a"], ["b", "c", "d"]]


def test_a_fast_disk_gets_each_record_separately() -> None:
    disk = Disk()
    disk.free.set()
    with recorder(disk) as beside:
        for name in "abc":
            beside.put(record(name))
            assert names(beside.written(SOON_S)) == [name]
    assert disk.together == [["a"], ["b"], ["c"]]


def test_put_blocks_while_the_queue_is_full() -> None:
    disk = Disk()
    with recorder(disk) as beside:
        beside.put(record("first"))
        assert disk.asked.acquire(timeout=SOON_S)
        for number in range(MOST):
            beside.put(record(str(number)))
        more = threading.Thread(target=beside.put, args=(record("more"),))
        more.start()
        more.join(0.05)
        assert more.is_alive()
        disk.free.set()
        more.join(SOON_S)
        assert not more.is_alive()
        assert len(beside.written(None)) == 2 + MOST
    assert max(len(group) for group in disk.together) == MOST


def test_queued_records_are_written_at_the_end() -> None:
    disk = Disk()
    with recorder(disk) as beside:
        beside.put(record("a"))
        beside.put(record("b"))
        threading.Timer(0.05, disk.free.set).start()
    assert [name for group in disk.together for name in group] == ["a", "b"]
    assert names(beside.written(0.0)) == ["a", "b"]


def test_a_failed_write_is_raised_at_the_end_without_a_call_of_written() -> None:
    disk = Disk(fails_at="a")
    disk.free.set()
    with pytest.raises(WriteError, match="full"), recorder(disk) as beside:
        beside.put(record("a"))


def test_a_lost_record_is_raised_rather_than_the_interruption_that_came_meanwhile() -> None:
    disk = Disk(fails_at="a")
    with pytest.raises(WriteError, match="full"), recorder(disk) as beside:
        beside.put(record("a"))
        disk.free.set()
        raise KeyboardInterrupt


def test_records_of_a_batch_before_the_failure_are_returned() -> None:
    disk = Disk(fails_at="c")
    with pytest.raises(WriteError, match="full"), recorder(disk) as beside:
        beside.put(record("first"))
        assert disk.asked.acquire(timeout=SOON_S)
        for name in "abcd":
            beside.put(record(name))
        disk.free.set()
    assert names(beside.written(0.0)) == ["first", "a", "b"]


def test_a_failure_is_raised_where_the_run_can_end_after_the_written_records_are_returned() -> None:
    disk = Disk(fails_at="b")
    disk.free.set()
    with pytest.raises(WriteError, match="full"), recorder(disk) as beside:
        beside.put(record("a"))
        assert names(beside.written(None)) == ["a"]
        beside.put(record("b"))
        with pytest.raises(WriteError, match="full"):
            beside.written(None)
        with pytest.raises(WriteError, match="full"):
            beside.put(record("c"))
        with pytest.raises(WriteError, match="full"):
            beside.written(0.0)
    assert disk.together == [["a"], ["b"]]
