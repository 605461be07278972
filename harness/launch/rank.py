"""The steps of every rank of a worker group under any launcher: registration, connection, trials."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from harness.launch.protocol import Job
from harness.launch.startup import Received, Registration
from harness.launch.supervision import StepCounter
from harness.launch.worker import run_group
from harness.measure.script.parent import COUNTER_VARIABLE, STACK_VARIABLE
from harness.plan.trial import WorkerGroup
from harness.train.ranks import Ranks

SendFromRank = Callable[[Received], bool]


def run_rank(job: Job, process: Registration, send: SendFromRank, connect: Callable[[], Ranks]) -> bool:
    """Register this process, connect it to the other ranks, run the group's trials; return False if refused."""
    with Path(process.stack).open("w") as stack, StepCounter(Path(process.counter)) as counter:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ.update({COUNTER_VARIABLE: process.counter, STACK_VARIABLE: process.stack})
        try:
            if not send(process):
                return False  # the run was given up while this process started
            ranks = connect()
            if not process.connected:
                send(replace(process, connected=True))
            run_group(job, ranks, send, counter.advance, Path(process.counter).with_name("trials"))
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    return True


def devices_of(
    group: WorkerGroup, local_rank: int, gpus: Sequence[torch.device], first: int = 0
) -> tuple[torch.device, ...]:
    """Return the devices of one worker of a node: the GPUs that are named, or the next of ``gpus`` from the first on.

    A GPU that is shared occurs several times.
    """
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    if not gpus:
        raise RuntimeError("no GPU is visible to torch in this process")
    if ids := group.placement.ids_of(local_rank):
        return tuple(gpus_by_number(ids))
    return tuple(gpus[(first + i) % len(gpus)] for i in range(count))


def gpus_by_number(numbers: Sequence[int]) -> list[torch.device]:
    """Return the GPUs of these numbers of the node, all of which are visible, in whatever order Ray lists them.

    nvidia-smi numbers GPUs by their PCI address. Raise RuntimeError if one is not visible.
    """
    places = range(torch.cuda.device_count())
    by_address = sorted(places, key=_pci_address)
    if max(numbers) >= len(by_address):
        raise RuntimeError(
            f"GPU {max(numbers)} is asked for, but this process sees {len(by_address)} of its node "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
        )
    return [torch.device("cuda", by_address[number]) for number in numbers]


def _pci_address(place: int) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(place)
    domain, bus, device = (getattr(properties, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    return domain, bus, device
