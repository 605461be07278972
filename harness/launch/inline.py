"""Worker groups of one rank in this process, without Ray: for tests and for a debugger."""

from __future__ import annotations

import bdb
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from harness.config.experiment import Experiment
from harness.launch.protocol import Job, Measured, Message, Sent, TrialStarted
from harness.launch.worker import TrialFailed, devices_of, run_group
from harness.plan.trial import TrialResult, WorkerGroup
from harness.train.ranks import Ranks

INTERRUPTIONS = (KeyboardInterrupt, bdb.BdbQuit)
"""Ctrl-C, and the debugger's command to quit."""


@dataclass(frozen=True)
class InlineLauncher:
    """Runs groups of one rank in this process; ``marked``: their rows say so, and enter no ratio."""

    experiment: Experiment
    threads_per_device: int = 1
    marked: bool = False

    def busy_cores(self) -> dict[str, float]:
        return {}

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """As Launcher describes, but the messages come when the group has ended. Raises KeyboardInterrupt."""
        if group.placement.workers != 1:
            raise ValueError(f"the inline launcher runs one worker, not {group.placement}")
        messages: list[Message] = []

        def send(message: Sent) -> bool:
            if isinstance(message, TrialStarted) and deadline is not None and time.time() >= deadline:
                return False
            if isinstance(message, Measured):  # what ends this process ends the run too
                return True
            if isinstance(message, TrialResult) and self.marked:
                message = replace(message, facts={**message.facts, "inline": True})
            messages.append(message)
            return True

        job = Job(self.experiment, group, self.threads_per_device)
        interrupted = False
        try:
            self._run(job, send)
        except TrialFailed as failed:
            if isinstance(failed.__context__, INTERRUPTIONS):
                messages.pop()  # the trial's failure: an interrupted trial has no row
                interrupted = True
        except INTERRUPTIONS:  # between two trials: those before have their rows
            interrupted = True
        yield from messages
        if interrupted:
            raise KeyboardInterrupt

    def _run(self, job: Job, send: Callable[[Sent], bool]) -> None:
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        devices = devices_of(job.group, 0, gpus)
        if devices[0].type == "cuda" and not job.experiment.programs:  # fsdp's shards are on the current device
            torch.cuda.set_device(devices[0])
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(job.group.backend, store=store, rank=0, world_size=1)
        try:
            ranks = Ranks(0, 1, 0, 0, "inline", "127.0.0.1", devices)
            run_group(job, ranks, send, lambda: None, Path(os.devnull))  # one rank waits for no other
        finally:
            dist.destroy_process_group()
