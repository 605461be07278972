"""The processes of a worker group, seen from outside: how they come up, whether they take steps, how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from harness.launch.postmortem import ProcessOutput
from harness.plan.trial import TrialResult

DIES_S = 0.1
"""How long after its sockets a dying process is gone."""

Ask = Callable[[str, Sequence[tuple[str, Any]]], list[Any]]
"""Asks the nodes' agents a question about (node id, what) each: one answer each, None where none comes."""


@dataclass(frozen=True)
class Registration:
    """A rank's process, before it joins anything: so that it can be watched and ended."""

    rank: int
    node_id: str
    pid: int
    counter: str
    stack: str
    created_at: float
    """When the process was made (unix time)."""
    connected: bool
    """Whether the ranks are connected by now."""
    folder: str = ""
    """Its scratch folder, where it has one of its own."""
    traces: ProcessOutput = field(default_factory=ProcessOutput)


@dataclass(frozen=True)
class ResourcesRequested:
    """What starts the processes asks for their resources (unix time)."""

    at: float


@dataclass
class StartupTimer:
    """When what happened while a worker group came up (unix time): its start, processes, imports, connection."""

    launched_at: float
    starter: str
    """What the time goes to until resources are asked for, or, where that is not told, until the first process."""
    asked_at: float | None = None
    created_at: float | None = None
    imported_at: float | None = None
    connected_at: float | None = None

    def saw(self, process: Registration | ResourcesRequested, now: float) -> None:
        if isinstance(process, ResourcesRequested):
            self.asked_at = self.asked_at or process.at
            return
        if process.connected:
            self.connected_at = self.connected_at or now
            return
        self.created_at = min(self.created_at or process.created_at, process.created_at)
        self.imported_at = now

    def parts(self, now: float) -> dict[str, float]:
        """Seconds until resources are asked for, a process is there, all have imported, are connected; until now."""
        asked = {"resources": self.asked_at} if self.asked_at else {}
        ends = {"worker start": self.created_at, "process group": self.imported_at, "first word": self.connected_at}
        begins = {self.starter: self.launched_at, **asked, **ends}
        known = [*(t for t in begins.values() if t is not None), now]
        if len(known) < len(begins) + 1:
            return {}
        names = tuple(begins)
        return {name: max(0.0, end - start) for name, (start, end) in zip(names, pairwise(known), strict=True)}


class Watchdog:
    """Sees from outside whether the processes of a group still take steps, and what became of them."""

    def __init__(self, ask: Ask, limit_s: float) -> None:
        self._ask_nodes, self._limit_s = ask, limit_s
        self._processes: dict[int, Registration] = {}
        self._counts: list[Any] = []
        self._changed = self._looked = time.monotonic()
        self.timed_out = False
        self.stacks: dict[int, str] = {}
        """Where each rank stood when the group hung."""
        self.silent: list[int] | None = None
        """The ranks that died without a word before another failed; None where that is not known."""
        self.failed_at: float | None = None
        """When the first failure was seen (unix time)."""
        self.was_cut_short = False

    @property
    def pids(self) -> list[int]:
        """The processes that are known by now."""
        return [process.pid for process in self._processes.values()]

    @property
    def connected(self) -> bool:
        """Whether a rank has joined the others: what fails from then on is a trial's."""
        return any(process.connected for process in self._processes.values())

    def add(self, process: Registration) -> None:
        known = self._processes.get(process.rank)
        self._processes[process.rank] = replace(known, connected=True) if known and process.connected else process

    def saw_progress(self) -> None:
        self._changed = time.monotonic()

    def saw_end(self, result: TrialResult) -> None:
        """At the first failure, notes who is dead while the rank that tells it lives: later its peers are ended."""
        if not result.ends_group or self.failed_at is not None:
            return
        self.failed_at = time.time()
        for wait_s in (0.0, DIES_S):
            time.sleep(wait_s)
            lives = dict(zip(self._processes, self._ask("alive", lambda p: p.pid), strict=True))
            speaker_lives = lives.get(result.error_rank or 0)
            if speaker_lives:
                self.silent = [rank for rank, alive in sorted(lives.items()) if not alive]
            if self.silent or not speaker_lives:
                return

    def saw_failure(self) -> None:
        """A group that ended in failure, of which no rank may have lived to tell."""
        self.failed_at = self.failed_at or time.time()

    def failed_for(self, seconds: float) -> bool:
        """Whether the first failure is so long ago."""
        return self.failed_at is not None and time.time() - self.failed_at > seconds

    def cut_short(self) -> None:
        """Ends a group that does not end by itself: who is dead from now on died of that."""
        self.was_cut_short = True
        self.end()

    def hangs(self) -> bool:
        """Whether no step was taken for the limit; looks at most four times in that span."""
        now = time.monotonic()
        if not self._processes or now - self._looked < min(5.0, self._limit_s / 4):
            return False
        self._looked = now
        counts = self._ask("progress", lambda p: p.counter)
        if counts != self._counts:
            self._counts, self._changed = counts, now
        self.timed_out = now - self._changed > self._limit_s
        return self.timed_out

    def end(self) -> None:
        """Notes where the processes stand, if they hang, and ends them and what they started."""
        if self.timed_out and not self.stacks:
            self.saw_failure()
            texts = self._ask("stacks", lambda p: (p.pid, p.stack))
            self.stacks = {rank: text or "" for rank, text in zip(self._processes, texts, strict=True)}
        self._ask("kill", lambda p: (p.pid, (p.counter, p.stack)))

    def clear(self) -> None:
        """Removes what the processes, all ended by now, may have left."""
        self._ask("clear", lambda p: p.folder)

    def printed(self, rank: int) -> str:
        """The end of what this rank printed; empty where it is not known."""
        answers = self._ask("printed", lambda p: p.traces)
        return dict(zip(self._processes, answers, strict=True)).get(rank) or ""

    def killed_for_memory(self, rank: int) -> bool:
        """Whether the kernel killed for memory beside this rank while it ran."""
        answers = self._ask("killed_for_memory", lambda p: p.traces)
        return bool(dict(zip(self._processes, answers, strict=True)).get(rank))

    def _ask(self, question: str, about: Callable[[Registration], Any]) -> list[Any]:
        return self._ask_nodes(question, [(p.node_id, about(p)) for p in self._processes.values()])
