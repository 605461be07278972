"""How the processes of a worker group register with the driver, and where the time of their start goes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from harness.launch.postmortem import ProcessOutput, output_of_this_process
from harness.launch.protocol import Sent

START_S, NODE_S = 120.0, 5.0
IMPORT_PART = 0.8
"""The part of a start that the imports of a process may take."""


def start_limit_s(nodes: int) -> float:
    """Return the timeout of a start on this number of nodes, in seconds: 120 on one, 435 on 64.

    Each process opens about 4,300 files to import torch and Ray; if the nodes share that file system, they wait for it
    the longer the more they are.
    """
    return START_S + NODE_S * (nodes - 1)


@dataclass(frozen=True)
class Registration:
    """A rank's process, before it joins the others: enough to watch it and to end it."""

    rank: int
    node_id: str
    counter: str
    """The file of its step counter."""
    stack: str
    """The file that it writes its stack to on SIGUSR1."""
    connected: bool
    """Whether the ranks' process group exists by now."""
    folder: str = ""
    """Its scratch folder, if it has one of its own."""
    pid: int = field(default_factory=os.getpid)
    created_at: float = field(default_factory=lambda: psutil.Process().create_time())
    """When the process was created (unix time)."""
    traces: ProcessOutput = field(default_factory=output_of_this_process)


@dataclass(frozen=True)
class ResourcesRequested:
    """The launcher's own process requests resources for the ranks (unix time)."""

    at: float


Received = Sent | Registration | ResourcesRequested
"""A message to the driver: for the run, or for the launcher alone."""


PARTS = ("resources", "worker start", "process group", "first word")
"""The parts of a start-up after the launcher's own, each with a time at which it begins."""


@dataclass
class StartupTimer:
    """Timestamps of a worker group's start-up (unix time): launch, process creation, imports, process group."""

    launched_at: float
    starter: str
    """The part that the time until resources are requested counts as; without that request, until the first process."""
    _begins: dict[str, float] = field(default_factory=dict)

    def record(self, event: Registration | ResourcesRequested, now: float) -> None:
        if isinstance(event, ResourcesRequested):
            self._begins.setdefault("resources", event.at)
        elif event.connected:
            self._begins.setdefault("first word", now)
        else:
            self._begins["worker start"] = min(self._begins.get("worker start", event.created_at), event.created_at)
            self._begins["process group"] = now  # until all have imported

    def parts(self, now: float) -> dict[str, float]:
        """Seconds until resources are requested, a process exists, all have imported, are connected, until now.

        Empty if a timestamp is missing; without a request for resources, that part is.
        """
        if not self._begins.keys() >= {*PARTS[1:]}:
            return {}
        begins = {self.starter: self.launched_at} | {part: self._begins[part] for part in PARTS if part in self._begins}
        times = [*begins.values(), now]
        return {part: max(0.0, end - start) for part, (start, end) in zip(begins, pairwise(times), strict=True)}
