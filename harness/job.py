"""What a worker group is told to do. Without torch: whoever passes it on has no use for that."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.experiment import Experiment
from harness.plan.trial import WorkerGroup


@dataclass(frozen=True)
class Job:
    """What a worker group needs to know."""

    experiment: Experiment
    group: WorkerGroup
    threads_per_device: int
    import_path: str | None = None
