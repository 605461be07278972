"""What Ray's controller tells the driver of a group that comes up. Without torch: the controller imports this."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from harness.watch import Asked


class AsksForResources(WorkerGroupCallback):  # type: ignore[misc]  # Ray's is untyped
    """Tells when the controller asks for the group's resources: what comes before is its own start."""

    def __init__(self, mailbox: Any, launch: int) -> None:
        self._mailbox, self._launch = mailbox, launch

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        ray.get(self._mailbox.put.remote(self._launch, Asked(time.time())))
