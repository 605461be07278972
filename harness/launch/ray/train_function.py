"""The training function of Ray Train: find the rank's devices, register with the driver, run the group's trials."""

from __future__ import annotations

import signal

import ray
import torch
from ray.train import get_context
from ray.train.torch import get_devices

from harness.launch.protocol import Job
from harness.launch.rank import devices_of, run_rank
from harness.launch.ray.controller import register
from harness.launch.startup import Received, Registration
from harness.plan.rows import Json
from harness.train.ranks import Ranks


def train(config: Json) -> None:
    """Run the group's trials on this rank: the training function of Ray Train."""
    job, mailbox, launch = config["job"], config["mailbox"], config["launch"]
    process = register(connected=True)

    def send(message: Received) -> bool:
        received: bool = ray.get(mailbox.put.remote(launch, message))
        return received

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by it, a loader ends its processes
    run_rank(job, process, send, lambda: _ranks(job, process))


def _ranks(job: Job, process: Registration) -> Ranks:
    """Return this rank's place; Ray Train has connected the ranks before."""
    context = get_context()
    on_gpus = job.group.device == "cuda"
    devices = devices_of(job.group, context.get_local_rank(), get_devices() if on_gpus else ())
    if on_gpus and not job.experiment.programs:  # whose own processes use the GPU
        torch.cuda.set_device(devices[0])
    return Ranks(
        rank=process.rank,
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        node_id=process.node_id,
        address=ray.util.get_node_ip_address(),
        devices=devices,
    )
