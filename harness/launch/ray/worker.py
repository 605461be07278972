"""What Ray Train calls on every rank: it finds its devices, tells the driver, and runs the group's trials."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import get_context
from ray.train.torch import get_devices

from harness.launch.heartbeat import StepCounter
from harness.launch.protocol import Job
from harness.launch.ray.controller import register
from harness.launch.worker import run_group
from harness.plan.trial import WorkerGroup
from harness.train.ranks import Ranks


def places_of(device_ids: Sequence[int], visible: str) -> list[int]:
    """Where torch counts these GPUs of the node, all of which are visible: Ray sorts '10' before '2'."""
    names = visible.split(",")
    numbers = [int(name) if name.isdigit() else place for place, name in enumerate(names)]
    in_order = sorted(range(len(names)), key=numbers.__getitem__)
    if max(device_ids) >= len(names):
        raise RuntimeError(f"GPU {max(device_ids)} is asked for, but of its node this group was given {visible!r}")
    return [in_order[number] for number in device_ids]


def _devices(group: WorkerGroup, local_rank: int) -> tuple[torch.device, ...]:
    """This worker's devices; one that is shared stands several times."""
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    if ids := group.placement.ids_of(local_rank):
        return tuple(
            torch.device("cuda", place) for place in places_of(ids, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        )
    mine = get_devices()
    return tuple(mine[i % len(mine)] for i in range(count))


def train(config: dict[str, Any]) -> None:
    """What Ray Train calls on every rank."""
    job: Job = config["job"]
    mailbox, launch = config["mailbox"], config["launch"]
    context = get_context()
    process = register(connected=True)

    def send(message: Any) -> bool:
        heard: bool = ray.get(mailbox.put.remote(launch, message))
        return heard

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by it, a loader ends its processes
    try:
        with Path(process.stack).open("w") as file, StepCounter(Path(process.counter)) as counter:
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            if not send(process):
                return  # the run was given up while this process came up
            devices = _devices(job.group, context.get_local_rank())
            if devices[0].type == "cuda":
                torch.cuda.set_device(devices[0])
            ranks = Ranks(
                rank=process.rank,
                world_size=context.get_world_size(),
                local_rank=context.get_local_rank(),
                node_rank=context.get_node_rank(),
                node_id=process.node_id,
                address=ray.util.get_node_ip_address(),
                devices=devices,
            )
            run_group(job, ranks, send, counter.advance)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
