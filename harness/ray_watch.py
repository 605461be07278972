"""One fit() and its worker processes, seen from the driver: whether they run, hang or have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from harness.cluster import Cluster
from harness.ray_worker import Registration

ANSWER_S = 15.0
"""How long a node has to answer a question about its processes."""


class Fit:
    """One fit() in a thread of its own, so that the main thread keeps Ctrl-C and its ears."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.error: BaseException | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # SystemExit too: Ray raises it when it is told to stop
            self.error = error


class Watch:
    """Sees from outside whether the processes of a group still take steps."""

    def __init__(self, cluster: Cluster, limit_s: float) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._processes: dict[int, Registration] = {}
        self._counts: list[Any] = []
        self._changed = self._looked = time.monotonic()
        self.timed_out = False
        self.stacks: str = ""

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

    def _ask(self, question: str, about: Callable[[Registration], Any]) -> list[Any]:
        """One answer a process, in order, from one question a node; None where a node does not answer."""
        answers: dict[int, Any] = {}
        by_node: dict[str, list[Registration]] = {}
        for process in self._processes.values():
            by_node.setdefault(process.node_id, []).append(process)
        asked = {
            node: getattr(self._cluster.agents[node], question).remote([about(process) for process in processes])
            for node, processes in by_node.items()
            if node in self._cluster.agents
        }
        for node, reference in asked.items():
            try:
                given = ray.get(reference, timeout=ANSWER_S)
            except ray.exceptions.RayError:
                continue
            answers |= {process.pid: answer for process, answer in zip(by_node[node], given or [], strict=False)}
        return [answers.get(pid) for pid in self._processes]
