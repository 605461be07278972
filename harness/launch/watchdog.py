"""Supervision of a worker group's processes from outside: their progress in steps, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from harness.launch.startup import Registration
from harness.plan.trial import TrialResult

DIES_S = 0.1
"""Seconds that a dying process may outlive its sockets."""

Ask = Callable[[str, Sequence[tuple[str, object]]], list[Any]]
"""Sends a question about each (node id, subject) to the nodes' agents; one answer each, None if none arrives."""


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


@dataclass(frozen=True)
class Verdict:
    """How a worker group ended, or why it must be ended now."""

    ending: Ending
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The stack of each rank of a group that hung."""

    @property
    def was_cut_short(self) -> bool:
        """Whether the launcher killed the processes: later deaths are its own work, and no evidence of a cause."""
        return self.ending in (Ending.AFTER_FAILURE, Ending.HUNG)


class Watchdog:
    """Observes from outside whether the processes of a group make progress in steps.

    ``limit_s``: the longest time without a step. ``grace_s``: how long the other ranks have after the first failure;
    None if they are ended by someone else. ``start_s``: how long the first process may take to register; None without
    such a limit.
    """

    def __init__(self, ask: Ask, limit_s: float, *, grace_s: float | None = None, start_s: float | None = None) -> None:
        self._ask_nodes, self._limit_s, self._grace_s, self._start_s = ask, limit_s, grace_s, start_s
        self._processes: dict[int, Registration] = {}
        self._counts: list[int | None] = []
        self._began = self._changed = self._looked = time.monotonic()
        self.dead_ranks: list[int] | None = None
        """The ranks that died without a report before another failed; None if that is not known."""
        self.failed_at: float | None = None
        """When the first failure was noticed (unix time)."""

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

    def poll(self) -> Verdict | None:
        """Return why the group must be ended now; None if it may go on."""
        if self._start_s is not None and not self._processes and time.monotonic() - self._began > self._start_s:
            return Verdict(Ending.NEVER_STARTED)
        if self._grace_s is not None and self.failed_at is not None and time.time() - self.failed_at > self._grace_s:
            return Verdict(Ending.AFTER_FAILURE)
        if self._hangs():
            self.record_failure()
            texts = self._ask("stacks", lambda p: (p.pid, p.stack))
            stacks = {rank: text or "" for rank, text in zip(self._processes, texts, strict=True)}
            return Verdict(Ending.HUNG, stacks)
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
        answers = self._ask("printed", lambda p: p.traces)
        return dict(zip(self._processes, answers, strict=True)).get(rank) or ""

    def killed_for_memory(self, rank: int) -> bool:
        """Return whether the kernel killed for memory beside this rank while it ran."""
        answers = self._ask("killed_for_memory", lambda p: p.traces)
        return bool(dict(zip(self._processes, answers, strict=True)).get(rank))

    def _ask(self, question: str, about: Callable[[Registration], object]) -> list[Any]:
        return self._ask_nodes(question, [(p.node_id, about(p)) for p in self._processes.values()])
