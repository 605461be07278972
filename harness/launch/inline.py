"""Worker groups of one rank in this process, without Ray."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.config.experiment import Experiment
from harness.launch.protocol import Job, Message, TrialStarted
from harness.launch.worker import TrialFailed, run_group
from harness.plan.trial import WorkerGroup
from harness.train.ranks import Ranks


@dataclass(frozen=True)
class InlineLauncher:
    """Runs groups of one worker in this process, without Ray: for tests and for a debugger."""

    experiment: Experiment
    threads_per_device: int = 1

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        if group.placement.workers != 1:
            raise ValueError(f"the inline launcher runs one worker, not {group.placement}")
        messages: list[Message] = []

        def send(message: Message) -> bool:
            if isinstance(message, TrialStarted) and deadline is not None and time.time() >= deadline:
                return False
            messages.append(message)
            return True

        devices = tuple(torch.device("cpu") for _ in range(group.placement.devices_per_worker))
        ranks = Ranks(0, 1, 0, 0, "inline", "127.0.0.1", devices)
        job = Job(self.experiment, group, self.threads_per_device)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            run_group(job, ranks, send, lambda: None)
        except TrialFailed:
            pass
        finally:
            dist.destroy_process_group()
        yield from messages
