"""Recording of finished trials in a thread, while the run measures the next ones."""

from __future__ import annotations

import threading

from harness.plan.rows import RecordedTrial
from harness.record.folder import RunFolder
from harness.record.rows import Record
from harness.system.signals import deferred_interrupts

MOST = 32
"""Maximum number of queued records; ``put`` blocks while the queue is full."""


class Recorder:
    """A thread that writes records to a run folder in order; records queued during a write are written together.

    A shared disk that blocks for a while thus does not keep the run from handling the messages of its ranks. Use it
    as a context manager: the exit waits until all records are on disk, and raises WriteError if one cannot be written.
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
        finally:  # an interruption does not hide a failed write
            self._raise_failure()

    def put(self, record: Record) -> None:
        """Queue a record; raises WriteError if an earlier one could not be written."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MOST or self._failure)
            self._raise_failure()
            self._waiting.append(record)
            self._changed.notify_all()

    def written(self, wait_s: float | None) -> list[tuple[Record, RecordedTrial]]:
        """Return the records written since the last call, in order, each with its line.

        Waits up to ``wait_s`` seconds, without a limit if None, until the queue is empty. Raises WriteError if there
        are none to return and a record could not be written.
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
        """Write records; return those that are on disk, in order, and the exception that stopped the others."""
        written = []
        try:
            for record, line in zip(records, self._folder.append_all(records), strict=True):
                written.append((record, line))
        except BaseException as error:  # raised in the main thread, where the run can end in order
            return written, error
        return written, None

    def _next(self) -> list[Record]:
        """Wait for queued records and return them; an empty list once the recorder is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            records, self._waiting = self._waiting, []
            self._busy = bool(records)
            self._changed.notify_all()
            return records

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
