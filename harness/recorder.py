"""Records trials beside the run that measures the next ones."""

from __future__ import annotations

import threading
from typing import Any

from harness.record import RunFolder
from harness.trial_record import Record

MOST = 64
"""Records that may wait for the disk; who hands over one more waits too."""


class Recorder:
    """A thread that puts records into a run folder, in order: those that come while the disk is busy go together.

    A disk that stands still for a while, as shared ones do, does not keep a run from hearing its ranks. Use as a
    context manager; what waits at its end is written all the same.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._busy = self._closed = False
        self._written: list[tuple[Record, dict[str, Any]]] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._work, name="recorder", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def put(self, record: Record) -> None:
        """Hands a record over. Raises WriteError where an earlier one could not be written."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MOST or self._failure)
            self._raise_failure()
            self._waiting.append(record)
            self._changed.notify_all()

    def written(self, wait_s: float | None) -> list[tuple[Record, dict[str, Any]]]:
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
        while records := self._next():
            lines, failure = self._recorded(records)
            with self._changed:
                self._busy, self._failure = False, failure
                self._written += zip(records, lines, strict=False)
                self._changed.notify_all()
            if failure:
                return

    def _recorded(self, records: list[Record]) -> tuple[list[dict[str, Any]], BaseException | None]:
        try:
            return self._folder.append_all(records), None
        except BaseException as error:  # is raised where the run can end in order
            return [], error

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
