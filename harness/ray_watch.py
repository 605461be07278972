"""One fit() and its worker processes, seen from the driver: whether they run, hang or have ended."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from harness.cluster import Cluster
from harness.ray_worker import Registration


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
        self._processes: list[Registration] = []
        self._counts: list[int | None] = []
        self._changed = self._looked = time.monotonic()
        self.timed_out = False
        self.stacks: str = ""

    def add(self, process: Registration) -> None:
        self._processes.append(process)

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
            named = zip(self._processes, texts, strict=False)
            self.stacks = "\n\n".join(f"rank {p.rank} (pid {p.pid}):\n{text}" for p, text in named)
        self._ask("kill", lambda p: p.pid)

    def _ask(self, question: str, about: Any) -> list[Any]:
        """One answer a process, in order; what a lost node does not answer is None."""
        answers: list[Any] = []
        for process in self._processes:
            agent = self._cluster.agents.get(process.node_id)
            try:
                answer = ray.get(getattr(agent, question).remote([about(process)]), timeout=15) if agent else None
            except ray.exceptions.RayError:
                answer = None
            answers.append(answer[0] if answer else None)
        return answers
