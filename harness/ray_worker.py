"""What Ray Train calls on every rank, and what it does there before the ranks connect."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
from ray.runtime_context import get_runtime_context
from ray.train import get_context
from ray.train.torch import TorchConfig, get_devices
from ray.train.torch.config import _TorchBackend

from harness.measure.progress import StepCounter, shared_folder
from harness.node import interface_of, lead_a_process_group
from harness.ranks import Ranks
from harness.traces import Traces, of_this_process
from harness.trial import WorkerGroup
from harness.watch import Registration

if TYPE_CHECKING:
    from harness.worker import Job


class InterfaceBackend(_TorchBackend):
    """Points gloo and NCCL to the interface that holds each node's own address, before they connect.

    Tells the driver of the processes first: connecting is where they may hang.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        for rank, (node_id, pid, created_at, traces) in enumerate(worker_group.execute(_prepare)):
            files = _files(pid, backend_config.launch)
            process = Registration(rank, node_id, pid, *files, created_at=created_at, connected=False, traces=traces)
            ray.get(backend_config.mailbox.put.remote(backend_config.launch, process))
        super().on_start(worker_group, backend_config)


@dataclass
class InterfaceTorchConfig(TorchConfig):
    """A process group whose ranks use their own node's interface and are known to the driver's mailbox."""

    mailbox: Any = None
    launch: int = -1

    @property
    def backend_cls(self) -> type[InterfaceBackend]:
        return InterfaceBackend


def _prepare() -> tuple[str, int, float, Traces]:
    """On every rank before it connects. Gives what the driver needs to find the process again."""
    lead_a_process_group()
    interface = interface_of(ray.util.get_node_ip_address())
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return get_runtime_context().get_node_id(), os.getpid(), psutil.Process().create_time(), of_this_process()


def _files(pid: int, launch: int) -> tuple[str, str]:
    """Where a process counts its steps, and where it writes down where it stands."""
    name = f"harness-{pid}-{launch}"
    return str(shared_folder() / name), str(Path(tempfile.gettempdir()) / f"{name}.stack")


def _devices(group: WorkerGroup) -> tuple[torch.device, ...]:
    """This worker's devices; one that is shared stands several times."""
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    mine = get_devices()
    return tuple(mine[i % len(mine)] for i in range(count))


def train(config: dict[str, Any]) -> None:
    """What Ray Train calls on every rank."""
    from harness.worker import run_group  # not above: Ray's controller imports this module too, and trains nothing

    job: Job = config["job"]
    mailbox, launch = config["mailbox"], config["launch"]
    context = get_context()
    node_id = get_runtime_context().get_node_id()
    counter_file, stack_file = (Path(name) for name in _files(os.getpid(), launch))

    def send(message: Any) -> bool:
        heard: bool = ray.get(mailbox.put.remote(launch, message))
        return heard

    try:
        with stack_file.open("w") as file, StepCounter(counter_file) as counter:
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            rank = context.get_world_rank()
            if not send(
                Registration(rank, node_id, os.getpid(), str(counter_file), str(stack_file), 0.0, connected=True)
            ):
                return  # the run was given up while this process came up
            ranks = Ranks(
                rank=rank,
                world_size=context.get_world_size(),
                local_rank=context.get_local_rank(),
                node_rank=context.get_node_rank(),
                node_id=node_id,
                address=ray.util.get_node_ip_address(),
                devices=_devices(job.group),
            )
            run_group(job, ranks, send, counter.advance)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        stack_file.unlink(missing_ok=True)
