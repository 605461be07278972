"""The results of a run in an object store, sent while it runs: ``--output URI``.

The local run folder stays as it is without a store: each record is on disk before the next message is handled, and the
store holds a copy. A thread of the driver sends it, and driver and ranks may share cores and a network. So nothing is
sent inside a timed window. The driver knows two times without one:

- between two trials of a worker group. A launcher starts the next trial once the driver has handled the last result:
  --inline because the driver starts it, Ray and torchrun because their mailboxes hold the announcement of a trial back
  until then (``holds`` of RayLauncher). The driver waits for the thread, for at most GAP_S, then for the end of the
  request that is under way, for at most REQUEST_S: pyarrow cannot be interrupted.
- from the end of a worker group until the next one is ready: its processes start.

A store that fails, or takes longer than GAP_S, costs one such wait; then nothing is sent until a pause has passed,
which doubles from PAUSE_S to LONGEST_PAUSE_S. A request that lasts longer than REQUEST_S, as one to Azure may, goes on
into the next trial: it waits for the network and takes no core, and the driver waits for no other before it has ended.
What is not sent is shown, and sent at the end, for at most FINAL_S, or by a resume.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.errors import StoreError
from harness.record.folder import RunFolder
from harness.record.store import open_store
from harness.record.writer import ClaimedError, SupersededError, Writer
from harness.report.row import plural
from harness.run.events import Emit, Event, GroupReady, GroupStarting, Note, TrialEnded, Unsent
from harness.run.request import Request, resume_command
from harness.system.process import interrupted
from harness.system.uri import below

GAP_S, REQUEST_S = 5.0, 15.0
PAUSE_S, LONGEST_PAUSE_S = 5.0, 320.0
FINAL_S, AGAIN_S = 120.0, 2.0
"""Time for what is left at the end of a run, and between two attempts then."""
TICK_S = 0.05
LOOK_S = 5.0
"""The time between two looks at another writer's claim."""


@contextmanager
def mirrored(request: Request, folder: RunFolder, emit: Emit) -> Iterator[Sending | None]:
    """Yield what sends a run folder to the store of the request, None without one; the rest is sent after the block.

    Raises StoreError before the block if the store cannot be used, or if another command writes the run.
    """
    if request.store is None:
        yield None
        return
    run = f"{folder.path.parent.name}/{folder.path.name}"
    writer = Writer(open_store(request.store), run, folder.path)
    _claim(writer, emit)
    writer.send(lambda: True)
    sending = Sending(writer, below(request.store, run), emit)
    try:
        yield sending
    finally:
        sending.finish(resume_command(request, folder.path) if request.resumable else "")


def _claim(writer: Writer, emit: Emit) -> None:
    """Claim the run; wait until an earlier claim ends or lapses. Raises ClaimedError once it is renewed instead."""
    try:
        writer.claim()
    except ClaimedError as first:
        emit(Note(f"{first}. Waiting for that"))
        end = time.monotonic() + first.left_s + 1
        while (left_s := end - time.monotonic()) > 0:
            try:
                if not writer.stands(first):
                    break
            except ClaimedError:
                raise
            except StoreError:  # it does not answer, and is looked at again
                pass
            time.sleep(min(LOOK_S, left_s))
        writer.claim()


@dataclass
class Sending:
    """Passes events on, and sends what was recorded in the times without a timed window.

    ``complete``: whether everything is in the store.
    """

    writer: Writer
    address: str
    emit: Emit
    complete: bool = False
    _may: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(default_factory=threading.Thread)
    _problem: StoreError | None = None
    _shown: set[str] = field(default_factory=set)
    _pause_s: float = 0.0
    _not_before: float = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, GroupReady):
            self._close()
        self.emit(event)
        if isinstance(event, GroupStarting):
            self._begin()
        if isinstance(event, TrialEnded):  # the next trial starts when this returns
            self._close(slow=self._begin() and not self._wait(GAP_S))

    def _begin(self) -> bool:
        """Begin to send; return False in a pause, or while the thread still waits for an earlier request."""
        self.writer.recorded()
        superseded = isinstance(self._problem, SupersededError)
        if self._thread.is_alive() or time.monotonic() < self._not_before or superseded:
            return False
        self._start()
        return True

    def _start(self, *, everything: bool = False) -> None:
        """Send in a thread, which does not keep the process from ending."""
        self._may.set()
        self._thread = threading.Thread(target=self._send, args=(everything,), name="mirror", daemon=True)
        self._thread.start()

    def _send(self, everything: bool) -> None:
        problem = None
        try:
            self.complete = self.writer.send(self._may.is_set, everything=everything) and everything
        except StoreError as error:
            problem = error
        except Exception as error:  # of the local folder, or of pyarrow: the run goes on
            problem = StoreError(f"{self.writer.folder}: cannot be sent: {type(error).__name__}: {error}")
        self._problem = problem

    def _close(self, *, slow: bool = False) -> None:
        """Forbid to send, wait for the request that is under way, and show what is not sent.

        A pause follows a problem, and a store that was too ``slow``: else each trial would wait for it.
        """
        if not self._may.is_set():
            self.emit(Unsent(self.writer.waiting))
            return
        self._may.clear()
        ended = self._wait(REQUEST_S) or interrupted()
        problem = self._problem if ended else StoreError(f"{self.address}: a request takes over {REQUEST_S:.0f} s")
        if problem or slow:
            self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
            self._not_before = time.monotonic() + self._pause_s
        else:
            self._pause_s = 0.0
        self._show(problem)

    def _wait(self, most_s: float) -> bool:
        """Wait until the thread has ended; return False if it does not in time, or the run is interrupted."""
        end = time.monotonic() + most_s
        while self._thread.is_alive():
            if time.monotonic() >= end or interrupted():
                return False
            self._thread.join(TICK_S)
        return True

    def _show(self, problem: StoreError | None) -> None:
        """Show how many trials are not sent, and each kind of problem once; the object's name is in quotes."""
        waiting = self.writer.waiting
        self.emit(Unsent(waiting))
        kind = re.sub("'[^']*'", "", str(problem)) if problem else ""
        if problem and kind not in self._shown:
            self._shown.add(kind)
            self.emit(Note(f"{problem}. The run goes on; {plural(waiting, 'trial')} in {self.writer.folder} alone"))
        elif self._shown and not problem and not waiting:
            self._shown.clear()
            self.emit(Note(f"{self.address} has every recorded trial again"))

    # -- at the end -------------------------------------------------------------------------------------------

    def finish(self, resume: str) -> None:
        """Send everything, the report too, for at most FINAL_S; show what is left, and ``resume``, which sends it."""
        try:
            self._send_rest(time.monotonic() + FINAL_S)
        finally:
            self._may.clear()
            self._show_end(resume)

    def _send_rest(self, end: float) -> None:
        self.writer.recorded()
        if self.writer.waiting:
            self.emit(Note(f"Sending {plural(self.writer.waiting, 'trial')} and the report to {self.address}"))
        if self._thread.is_alive():  # it sends what was to be sent before
            self._thread.join(FINAL_S)
        while not (self._thread.is_alive() or self.complete or isinstance(self._problem, SupersededError)):
            self._start(everything=True)
            self._thread.join(max(0.0, end - time.monotonic()))
            if self.complete or time.monotonic() >= end:
                return
            time.sleep(AGAIN_S)

    def _show_end(self, resume: str) -> None:
        self.emit(Unsent(self.writer.waiting))
        if self.complete:
            try:
                self.writer.release()
            except StoreError as error:
                self.emit(Note(f"{error}. Everything is sent; another command can resume once the claim has lapsed"))
            self.emit(Note(f"Results in {self.address}"))
            return
        said = f"{self._problem}. " if self._problem else ""
        left = f"{plural(self.writer.waiting, 'trial')} and the report" if self.writer.waiting else "the report"
        if isinstance(self._problem, SupersededError):
            self.emit(Note(f"{said}Not sent: {left}; they are in {self.writer.folder}"))
            return
        command = f"; send them with:\n{resume}" if resume else ""
        self.emit(Note(f"{said}NOT in {self.address}: {left}. They are in {self.writer.folder}{command}"))
