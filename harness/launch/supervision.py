"""Supervision of a worker group: its messages, its progress in steps read from outside, its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from harness.launch.protocol import GroupStarted, Measured, Message, Sent, TrialStarted
from harness.launch.startup import Received, Registration, ResourcesRequested, StartupTimer
from harness.plan.trial import TrialResult

DIES_S = 0.1
"""Seconds that a dying process may outlive its sockets."""

Answers = list[Any]
Ask = Callable[[str, Sequence[tuple[str, object]]], Answers]
"""Sends a question about each (node id, subject) to the nodes' agents; one answer each, None if none arrives."""
TAKE_S = 1.0
"""The timeout of one look at the messages; a message ends it."""
ENDING_S = 0.05
"""Timeout of a look after the last result, when only the end of the processes is awaited."""


class Ending(Enum):
    """How the supervision of a worker group ends."""

    BY_ITSELF = auto()
    """Its processes ended."""
    AFTER_FAILURE = auto()
    """A rank failed, and the others were ended after their grace period."""
    HUNG = auto()
    """No rank took a step within the limit."""
    NEVER_STARTED = auto()
    """No process registered before the timeout."""
    NODE_LOST = auto()
    """A node of the group died before the ranks were connected."""

    @property
    def was_cut_short(self) -> bool:
        """Whether the launcher killed the processes: later deaths are its own work, and no evidence of a cause."""
        return self in (Ending.AFTER_FAILURE, Ending.HUNG)


class Watchdog:
    """Observes from outside whether the processes of a group make progress in steps.

    Timeouts in seconds: ``limit_s`` without a step; ``grace_s`` of the other ranks after the first failure, None if
    the launcher does not end them; ``start_s`` until the first process registers, None for no timeout.
    ``find_dead_node`` names a dead node of the group; it is called until the ranks are connected.
    """

    def __init__(
        self,
        ask: Ask,
        limit_s: float,
        *,
        grace_s: float | None = None,
        start_s: float | None = None,
        find_dead_node: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._ask_nodes, self._limit_s, self._grace_s, self._start_s = ask, limit_s, grace_s, start_s
        self._find_dead_node = find_dead_node
        self._processes: dict[int, Registration] = {}
        self._counts: list[int | None] = []
        self._began = self._changed = self._looked = time.monotonic()
        self.dead_ranks: list[int] | None = None
        """The ranks that died without a report before another failed; None if that is not known."""
        self.failed_at: float | None = None
        """When the first failure was noticed (unix time)."""
        self.stacks: dict[int, str] = {}
        """The stack of each rank of a group that hung."""
        self.dead_node: str | None = None
        """The node that died before the ranks were connected."""

    @property
    def connected(self) -> bool:
        """Whether a rank has joined the others: a failure from then on is a trial's."""
        return any(process.connected for process in self._processes.values())

    def add(self, process: Registration) -> None:
        known = self._processes.get(process.rank)
        self._processes[process.rank] = replace(known, connected=True) if known and process.connected else process

    def record_progress(self) -> None:
        self._changed = time.monotonic()

    def record_result(self, result: TrialResult) -> None:
        """On the first failure, record which ranks are already dead, before the launcher kills the others."""
        if not result.ends_group or self.failed_at is not None:
            return
        self.failed_at = time.time()
        for wait_s in (0.0, DIES_S):
            time.sleep(wait_s)
            lives = dict(zip(self._processes, self._ask("alive", lambda p: p.pid), strict=True))
            reporter_lives = lives.get(result.error_rank or 0)
            if reporter_lives:
                self.dead_ranks = [rank for rank, alive in sorted(lives.items()) if not alive]
            if self.dead_ranks or not reporter_lives:
                return

    def record_failure(self) -> None:
        """Record the time of a failure that no rank may have reported."""
        self.failed_at = self.failed_at or time.time()

    def poll(self) -> Ending | None:
        """Return why the group must be ended now; None if it may go on."""
        if self._start_s is not None and not self._processes and time.monotonic() - self._began > self._start_s:
            return Ending.NEVER_STARTED
        if not self.connected and (dead := self._find_dead_node()):
            self.dead_node = dead
            self.record_failure()
            return Ending.NODE_LOST
        if self._grace_s is not None and self.failed_at is not None and time.time() - self.failed_at > self._grace_s:
            return Ending.AFTER_FAILURE
        if self._hangs():
            self.record_failure()
            texts = self._ask("stacks", lambda p: (p.pid, p.stack))
            self.stacks = {rank: text or "" for rank, text in zip(self._processes, texts, strict=True)}
            return Ending.HUNG
        return None

    def _hangs(self) -> bool:
        """Return whether the limit has passed without a step; reads the counters at most four times per limit."""
        now = time.monotonic()
        if not self._processes or now - self._looked < min(5.0, self._limit_s / 4):
            return False
        self._looked = now
        counts = self._ask("progress", lambda p: p.counter)
        if counts != self._counts:
            self._counts, self._changed = counts, now
        return now - self._changed > self._limit_s

    def kill(self) -> None:
        """Kill the processes and what they started."""
        self._ask("kill", lambda p: (p.pid, (p.counter, p.stack)))

    def clear(self) -> None:
        """Remove what the processes, all ended by now, may have left."""
        self._ask("clear", lambda p: p.folder)

    def printed(self, rank: int) -> str:
        """Return the end of this rank's output; empty if it is not known."""
        return self._of_ended("printed", rank) or ""

    def killed_for_memory(self, rank: int) -> bool:
        """Return whether the kernel killed for memory beside this rank while it ran."""
        return bool(self._of_ended("killed_for_memory", rank))

    def _of_ended(self, question: str, rank: int) -> Any:
        return dict(zip(self._processes, self._ask(question, lambda p: p.traces), strict=True)).get(rank)

    def _ask(self, question: str, about: Callable[[Registration], object]) -> Answers:
        return self._ask_nodes(question, [(p.node_id, about(p)) for p in self._processes.values()])


class RunningGroup(Protocol):
    """The processes of a worker group that a launcher has started."""

    @property
    def ended(self) -> bool:
        """Whether all of them have ended."""
        ...

    def take(self, timeout_s: float) -> Sequence[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``timeout_s``."""
        ...

    def kill(self) -> None:
        """Kill them and what they started; return when they have ended, or when that takes too long."""
        ...

    def release(self) -> None:
        """Free what the group holds, however it ended: kill it if it still runs."""
        ...


@dataclass(frozen=True)
class GroupEnd:
    """How a worker group ended: its finished trials, the current one, and the failures in order."""

    ending: Ending
    finished: tuple[TrialResult, ...]
    failures: tuple[TrialResult, ...]
    """Not yielded: the cause may be a failure of a peer, which is only known when all processes have ended."""
    current: str | None
    measured: TrialResult | None = None
    """The measurement of the current trial, if it was complete."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stack of each rank of a group that hung."""


def supervise(
    group: RunningGroup, watchdog: Watchdog, timer: StartupTimer, last: str
) -> Generator[Message, None, GroupEnd]:
    """Yield the messages of a group, whose last trial is ``last``, until its end; return how it ended.

    Failures and measurements without their explanation are not yielded. Closing the generator ends the group.
    """
    finished, failures = list[TrialResult](), list[TrialResult]()
    current: str | None = None
    measured: TrialResult | None = None
    timeout_s = TAKE_S
    try:
        while True:
            ended = group.ended  # before the last look, so that no message sent until then is missed
            for message in _messages(group.take(0.0 if ended else timeout_s), watchdog, timer):
                match message:
                    case GroupStarted():
                        message = replace(message, parts=timer.parts(time.time()))
                    case TrialStarted():
                        current = message.trial_id
                    case Measured():
                        measured = message.result
                        continue
                    case TrialResult():
                        timeout_s = ENDING_S if message.trial_id == last or message.ends_group else timeout_s
                        watchdog.record_result(message)
                        (failures if message.ends_group else finished).append(message)
                        if message.ends_group:
                            continue
                        current = measured = None
                yield message
                watchdog.record_progress()  # what the driver did meanwhile is no time without a step
            ending = Ending.BY_ITSELF if ended else watchdog.poll()
            if ending is not None:
                break
        if ending.was_cut_short:
            group.kill()  # and wait; a group that did not start may hold no process to end
    finally:
        group.release()
    return GroupEnd(ending, tuple(finished), tuple(failures), current, measured, watchdog.stacks)


def _messages(received: Sequence[Received], watchdog: Watchdog, timer: StartupTimer) -> Iterator[Sent]:
    """Yield the messages of the trials; record those of the start."""
    for message in received:
        watchdog.record_progress()
        if isinstance(message, Registration):
            watchdog.add(message)
        if isinstance(message, Registration | ResourcesRequested):
            timer.record(message, time.time())
        else:
            yield message
