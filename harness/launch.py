"""The seam to the cluster, one method wide: a worker group goes in, messages come out, failure is a value."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from harness.config.experiment import Experiment
from harness.job import Job
from harness.messages import Message, TrialStarted
from harness.plan.trial import WorkerGroup
from harness.train.ranks import Ranks
from harness.worker import TrialFailed, run_group


class Launcher(Protocol):
    """Runs worker groups."""

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """Runs a group in fresh processes and gives its messages as they come.

        After the first failed trial the group ends, and its other trials stay without a result. No trial starts
        after ``deadline`` (unix time). Closing the generator ends the processes.
        """
        ...


@dataclass(frozen=True)
class ByLauncher:
    """Hands each group to the launcher that its cells name."""

    launchers: Mapping[str, Launcher]

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        return self.launchers[group.launcher].launch(group, deadline=deadline)


def process_variables(group: WorkerGroup, threads_per_device: int) -> dict[str, str]:
    """What every launcher sets in the environment of a group's processes before they import anything."""
    threads = str(threads_per_device)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if group.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a CPU trial on a GPU machine must not see its GPUs
    if group.placement.device_ids:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers are those of nvidia-smi
    return variables


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
