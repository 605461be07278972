"""The processes of a worker group, seen from outside: how they come up, whether they take steps, how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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


@dataclass
class ComingUp:
    """When what happened while a worker group came up (unix time): its start, processes, imports, connection."""

    launched_at: float
    starter: str
    """What the time until the first process goes to."""
    created_at: float | None = None
    imported_at: float | None = None
    connected_at: float | None = None

    def saw(self, process: Registration, now: float) -> None:
        if process.connected:
            self.connected_at = self.connected_at or now
            return
        self.created_at = min(self.created_at or process.created_at, process.created_at)
        self.imported_at = now

    def parts(self, now: float) -> dict[str, float]:
        """Seconds until the first worker process, until all have imported, until they are connected, until now."""
        times = [self.launched_at, self.created_at, self.imported_at, self.connected_at, now]
        known = [t for t in times if t is not None]
        if len(known) < len(times):
            return {}
        names = (self.starter, "worker start", "process group", "first word")
        return {name: max(0.0, end - start) for name, (start, end) in zip(names, pairwise(known), strict=True)}


class Watch:
    """Sees from outside whether the processes of a group still take steps."""

    def __init__(self, ask: Ask, limit_s: float) -> None:
        self._ask_nodes, self._limit_s = ask, limit_s
        self._processes: dict[int, Registration] = {}
        self._counts: list[Any] = []
        self._changed = self._looked = time.monotonic()
        self.timed_out = False
        self.stacks: str = ""

    @property
    def pids(self) -> list[int]:
        """The processes that are known by now."""
        return list(self._processes)

    def add(self, process: Registration) -> None:
        self._processes[process.pid] = process

    def saw_progress(self) -> None:
        self._changed = time.monotonic()

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
        """Notes where the processes stand, if they hang, and ends them."""
        if self.timed_out:
            texts = self._ask("stacks", lambda p: (p.pid, p.stack))
            named = sorted(zip(self._processes.values(), texts, strict=True), key=lambda pair: pair[0].rank)
            self.stacks = "\n\n".join(f"rank {p.rank} (pid {p.pid}):\n{text or 'no answer'}" for p, text in named)
        self._ask("kill", lambda p: (p.pid, (p.counter, p.stack)))

    def clear(self) -> None:
        """Removes what the processes, all ended by now, may have left."""
        self._ask("clear", lambda p: p.folder)

    def _ask(self, question: str, about: Callable[[Registration], Any]) -> list[Any]:
        return self._ask_nodes(question, [(p.node_id, about(p)) for p in self._processes.values()])
