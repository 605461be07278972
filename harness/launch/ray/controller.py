"""How the ranks of a worker group connect. Without torch: Ray's controller imports this module and does not train."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.runtime_context import get_runtime_context
from ray.train import get_context
from ray.train.backend import Backend, BackendConfig

from harness.launch.agent import interface_of, lead_a_process_group
from harness.launch.ray import private
from harness.launch.startup import Registration, ResourcesRequested
from harness.system.scratch import Scratch, shared_memory

LOOPBACK = "127.0.0.1"
LEAVE_S = 30.0
"""Timeout of the ranks to leave their process group; they end in any case."""
WorkerGroupCallback: Any = private.worker_group_callback()


class RankBackend(Backend):
    """Connects the ranks: by the loopback and a file on one node, else by the interface of each node's address.

    Ray's own backend opens torch's TCPStore, which listens on every network without authentication; on several nodes
    it is used. The processes are registered with the driver first, since they may hang while they connect.
    """

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: RankConfig) -> None:
        processes: list[Registration] = worker_group.execute(_prepare)
        for process in processes:
            ray.get(backend_config.mailbox.put.remote(backend_config.launch, process))
        alone = len({process.node_id for process in processes}) == 1
        worker_group.execute(_use_interface, alone)
        meeting = f"file://{processes[0].folder}/ranks"
        if not alone:  # torch's store, on the node of rank 0
            worker_group.execute(_set_master, *worker_group.execute_single(0, _address_and_port))
            meeting = "env://"
        size, config = len(worker_group), backend_config
        joining = [
            worker_group.execute_single_async(rank, _join, config.backend, rank, size, meeting, config.timeout_s)
            for rank in range(size)
        ]
        ray.get(joining)

    def on_shutdown(self, worker_group: Any, backend_config: RankConfig) -> None:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            ray.get(worker_group.execute_async(_leave), timeout=LEAVE_S)


@dataclass
class RankConfig(BackendConfig):
    """A process group whose ranks use their node's interface and are registered at the driver's mailbox."""

    backend: str
    timeout_s: float
    mailbox: ActorHandle
    launch: int

    @property
    def backend_cls(self) -> type[RankBackend]:
        return RankBackend

    @property
    def train_func_context(self) -> type[contextlib.nullcontext[None]]:
        return contextlib.nullcontext  # Ray's own selects the first GPU of the worker, which need not be the named one


def register(*, connected: bool = False) -> Registration:
    """Return the registration of this process."""
    folder = _scratch().path
    rank, node_id = get_context().get_world_rank(), get_runtime_context().get_node_id()
    return Registration(rank, node_id, f"{folder}/steps", f"{folder}/stack", connected, str(folder))


@cache
def _scratch() -> Scratch:
    """Return this process's scratch folder, created on first use. The driver removes it when the group has ended."""
    return Scratch(shared_memory())


def _prepare() -> Registration:
    """Import torch on a rank, before it connects, and return its registration."""
    import harness.train.ranks  # noqa: F401  # takes seconds, which do not count as connecting

    lead_a_process_group()
    return register()


def _use_interface(alone: bool) -> None:
    """Set the interface of gloo and NCCL on this node, unless the user has set one."""
    interface = interface_of(LOOPBACK if alone else ray.util.get_node_ip_address())
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _address_and_port() -> tuple[str, int]:
    """Return, on rank 0, the address of its node and a free port."""
    address: str = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind(("", 0))
        return address, int(free.getsockname()[1])


def _set_master(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def _join(backend: str, rank: int, world_size: int, meeting: str, timeout_s: float) -> None:
    """Connect a rank, with the variables that Ray Train and torchrun set for a training function."""
    from ray.train.torch import get_device
    from torch import distributed

    from harness.train.ranks import connecting_on_use

    context = get_context()
    os.environ["LOCAL_RANK"] = str(context.get_local_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(context.get_local_world_size())
    os.environ["NODE_RANK"] = str(context.get_node_rank())
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(get_device())
    if "nccl" in backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a collective that timed out ends its process
    timeout = timedelta(seconds=timeout_s)
    with connecting_on_use(backend):
        distributed.init_process_group(
            backend=backend, init_method=meeting, rank=rank, world_size=world_size, timeout=timeout
        )


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.destroy_process_group()


class ResourceRequestCallback(WorkerGroupCallback):
    """Report when the controller requests the group's resources: what comes before is its own start."""

    def __init__(self, mailbox: ActorHandle, launch: int) -> None:
        self._mailbox, self._launch = mailbox, launch

    def before_worker_group_start(self, worker_group_context: object) -> None:
        ray.get(self._mailbox.put.remote(self._launch, ResourcesRequested(time.time())))


def startup_callbacks(mailbox: ActorHandle, launch: int) -> list[ResourceRequestCallback]:
    """Return the callbacks that time a worker group's start; none if Ray has no such callbacks."""
    return [] if WorkerGroupCallback is object else [ResourceRequestCallback(mailbox, launch)]
