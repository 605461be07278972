"""What Ray Train calls on every rank, and what it does there before the ranks connect."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
from ray.runtime_context import get_runtime_context
from ray.train import get_context
from ray.train.torch import TorchConfig, get_devices
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend

from harness.measure.progress import StepCounter
from harness.node import interface_of, lead_a_process_group
from harness.ranks import Ranks
from harness.scratch import Scratch, shared_memory
from harness.traces import of_this_process
from harness.trial import WorkerGroup
from harness.watch import Registration

if TYPE_CHECKING:
    from harness.worker import Job


LOOPBACK = "127.0.0.1"


class InterfaceBackend(_TorchBackend):
    """Connects the ranks: over the loopback and a file on one node, else over the interface of each node's address.

    Ray's own way opens torch's TCPStore, which listens to every network and asks nobody who they are. On several
    nodes it stays. Tells the driver of the processes first: connecting is where they may hang.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        processes: list[Registration] = worker_group.execute(_prepare)
        for process in processes:
            ray.get(backend_config.mailbox.put.remote(backend_config.launch, process))
        alone = len({process.node_id for process in processes}) == 1
        worker_group.execute(_use_interface, alone)
        if alone:
            _connect_over_file(worker_group, backend_config, f"file://{processes[0].folder}/ranks")
        else:
            super().on_start(worker_group, backend_config)


@dataclass
class InterfaceTorchConfig(TorchConfig):
    """A process group whose ranks use their own node's interface and are known to the driver's mailbox."""

    mailbox: Any = None
    launch: int = -1

    @property
    def backend_cls(self) -> type[InterfaceBackend]:
        return InterfaceBackend

    @property
    def train_func_context(self) -> type[nullcontext[None]]:
        return nullcontext  # Ray's own takes the first GPU that it gave, which need not be the one that is named


def _connect_over_file(worker_group: Any, config: Any, meeting: str) -> None:
    """What Ray's own backend does, but for the place where the ranks meet."""
    worker_group.execute(_set_torch_distributed_env_vars)
    size = len(worker_group)
    joining = [
        worker_group.execute_single_async(
            rank,
            _setup_torch_process_group,
            backend=config.backend,
            world_rank=rank,
            world_size=size,
            init_method=meeting,
            timeout_s=config.timeout_s,
        )
        for rank in range(size)
    ]
    ray.get(joining)


def _use_interface(alone: bool) -> None:
    """Points gloo and NCCL to an interface of this node, unless the user has done so."""
    interface = interface_of(LOOPBACK if alone else ray.util.get_node_ip_address())
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


@cache
def _scratch() -> Scratch:
    """This process's own folder, made when it is first asked for. The driver removes it when the group has ended."""
    return Scratch(shared_memory())


def _register(*, connected: bool = False) -> Registration:
    """This process: where it counts its steps, and where it writes down where it stands."""
    folder = _scratch().path
    return Registration(
        rank=get_context().get_world_rank(),
        node_id=get_runtime_context().get_node_id(),
        pid=os.getpid(),
        counter=str(folder / "steps"),
        stack=str(folder / "stack"),
        created_at=psutil.Process().create_time(),
        connected=connected,
        folder=str(folder),
        traces=of_this_process(),
    )


def _prepare() -> Registration:
    """On every rank before it connects: what the driver needs to find the process again."""
    lead_a_process_group()
    return _register()


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
    from harness.worker import run_group  # not above: Ray's controller imports this module too, and trains nothing

    job: Job = config["job"]
    mailbox, launch = config["mailbox"], config["launch"]
    context = get_context()
    process = _register(connected=True)

    def send(message: Any) -> bool:
        heard: bool = ray.get(mailbox.put.remote(launch, message))
        return heard

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
