"""Nodes with slow links on this machine: namespaces on a bridge, and worker groups whose ranks are forks in them.

Every node's link sends at a rate that the kernel's token bucket sets (tbf); ranks of one node use its loopback. Ranks
wait instead of computing (workload emulated_compute). What this world lacks: kernels, GPUs, NCCL, delay on the wire.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from harness.config.experiment import Experiment
from harness.launch.protocol import Job, Measured, Message, Sent
from harness.launch.worker import TrialFailed, run_group
from harness.plan.inventory import Inventory, Node
from harness.plan.trial import TrialResult, WorkerGroup
from harness.train.ranks import Ranks
from tests.forks import start

CLONE_NEWNET, PR_SET_TIMERSLACK = 0x40000000, 29


def why_not() -> str | None:
    """Return why there can be no such links here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    done = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, check=False)
    return "needs tc (iproute2)" if done.returncode else None


@dataclass(frozen=True)
class World:
    """Namespaces, one a node."""

    prefix: str
    nodes: int

    def name(self, node: int) -> str:
        return f"{self.prefix}{node}"

    def set_rate(self, mbit: float) -> None:
        """Set the rate of every node's link."""
        for node in range(self.nodes):
            shape = f"tbf rate {round(1000 * mbit)}kbit burst 32k limit 8mb"
            _run(f"ip netns exec {self.name(node)} tc qdisc replace dev s0 root {shape}")

    def inventory(self, per_node: int) -> Inventory:
        """Return the inventory of these nodes, with slots for so many ranks each."""
        names = [self.name(node) for node in range(self.nodes)]
        return Inventory(tuple(Node(name, name, name, per_node, slots=per_node) for name in names), attached=True)


@contextmanager
def world(nodes: int) -> Iterator[World]:
    """Yield nodes at 10.99.0.1 and on; they are gone afterwards."""
    made = World(f"h{os.getpid()}p", nodes)
    bridge = f"{made.prefix}b"[:15]
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for node in range(nodes):
            name, outer = made.name(node), f"{made.prefix}v{node}"[:15]
            _run(f"ip netns add {name}")
            _run(f"ip link add {outer} type veth peer name s0 netns {name}")
            _run(f"ip link set {outer} master {bridge} up")
            _run(f"ip -n {name} addr add 10.99.0.{node + 1}/24 dev s0")
            _run(f"ip -n {name} link set s0 gso_max_size 16384 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
        yield made
    finally:
        for command in (*(f"netns del {made.name(node)}" for node in range(nodes)), f"link del {bridge}"):
            subprocess.run(["ip", *command.split()], capture_output=True, check=False)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@dataclass
class NamespaceLauncher:
    """Runs worker groups as forks, each in its node's namespace."""

    experiment: Experiment
    world: World
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()))
    count: int = 0

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """As Launcher describes."""
        self.count += 1
        size = group.placement.nodes * group.placement.workers_per_node
        queue: Any = get_context("forkserver").Queue()
        job = Job(self.experiment, group, 1)
        store = self.folder / f"store{self.count}"
        ranks = [start(_rank, rank, job, self.world, store, queue) for rank in range(size)]
        try:
            while any(rank.is_alive() for rank in ranks) or not queue.empty():
                try:
                    message = queue.get(timeout=0.1)
                except Empty:
                    continue
                yield message
                if isinstance(message, TrialResult) and message.ends_group:
                    return
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _rank(rank: int, job: Job, world: World, store: Path, queue: Any) -> None:
    placement = job.group.placement
    node, local = divmod(rank, placement.workers_per_node)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{world.name(node)}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    libc.prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # waits end within a microsecond of their deadline
    os.environ["GLOO_SOCKET_IFNAME"] = "s0"
    size = placement.nodes * placement.workers_per_node
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    ranks = Ranks(rank, size, local, node, world.name(node), f"10.99.0.{node + 1}", (torch.device("cpu"),))

    def send(message: Sent) -> bool:
        if not isinstance(message, Measured):  # what ends a rank ends the study
            queue.put(message)
        return True

    try:
        run_group(job, ranks, send, lambda: None, store.with_suffix(".trials"))
        if dist.is_initialized():
            ranks.barrier()
    except TrialFailed:
        pass
    queue.close()
    queue.join_thread()
    os._exit(0)
