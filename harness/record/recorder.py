"""Records trials beside the run that measures the next ones."""

from __future__ import annotations

import threading

from harness.plan.rows import RecordedTrial
from harness.record.folder import RunFolder
from harness.record.rows import Record
from harness.system.signals import deferred_interrupts

MOST = 32
"""Records that may wait for the disk; who hands over one more waits too."""


class Recorder:
    """A thread that puts records into a run folder, in order: those that come while the disk is busy go together.

    A disk that stands still for a while, as shared ones do, does not keep a run from hearing its ranks. Use as a
    context manager: its end waits until all is on disk, and raises WriteError where that cannot be.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._busy = self._closed = False
        self._written: list[tuple[Record, RecordedTrial]] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with deferred_interrupts():
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                self._thread.join()
        finally:  # an interruption does not hide that something was lost
            self._raise_failure()

    def put(self, record: Record) -> None:
        """Hands a record over. Raises WriteError where an earlier one could not be written."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MOST or self._failure)
            self._raise_failure()
            self._waiting.append(record)
            self._changed.notify_all()

    def written(self, wait_s: float | None) -> list[tuple[Record, RecordedTrial]]:
        """The records that came on disk since this was last asked, in order, each with its line.

        Waits at most so many seconds until all are there, None: for as long as it takes. Raises WriteError where
        there are none and a record could not be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not (self._waiting or self._busy), wait_s)
            written, self._written = self._written, []
            if not written:
                self._raise_failure()
            return written

    def _work(self) -> None:
        while not self._failure and (records := self._next()):
            written, failure = self._recorded(records)
            with self._changed:
                self._busy, self._failure = False, failure
                self._written += written
                self._changed.notify_all()

    def _recorded(self, records: list[Record]) -> tuple[list[tuple[Record, RecordedTrial]], BaseException | None]:
        """What came on disk, in order, and why not the rest."""
        written = []
        try:
            for record, line in zip(records, self._folder.append_all(records), strict=True):
                written.append((record, line))
        except BaseException as error:  # is raised where the run can end in order
            return written, error
        return written, None

    def _next(self) -> list[Record]:
        """What waits; nothing once all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            records, self._waiting = self._waiting, []
            self._busy = bool(records)
            self._changed.notify_all()
            return records

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
