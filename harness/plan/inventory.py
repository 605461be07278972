"""The inventory of nodes and devices, and the machine of one experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.config.known_hardware import KnownDevice

MAX_THREADS_PER_GPU = 8


@dataclass(frozen=True)
class Node:
    """One node. ``cores``: physical cores. ``compiler``: whether a C++ compiler is on its path.

    ``memory_bytes``: of the node itself; ``gpu_memory_bytes``: of its smallest GPU. ``gpu_model``: names of different
    GPUs are joined by ' + '.
    ``slots``: the CPUs that ``ray start --num-cpus`` offers, which may be more than it has; None without a cluster.
    ``cpu``: the processor's name.
    """

    node_id: str
    address: str
    host: str
    cores: int
    gpus: int = 0
    gpu_model: str | None = None
    memory_bytes: int | None = None
    compiler: bool = True
    slots: int | None = None
    gpu_memory_bytes: int | None = None
    cpu: str | None = None

    @property
    def place(self) -> str:
        """Its host with its address: two nodes may share a host."""
        return f"{self.host} ({self.address})"

    @property
    def hardware(self) -> str:
        """The type of its devices and processor: in every ratio, nodes of one type are alike."""
        return f"{self.gpu_model}, {self.cpu}"

    @property
    def shape(self) -> tuple[str, int, int, int | None]:
        """The hardware with the numbers of devices: nodes of one shape replace each other."""
        return self.hardware, self.gpus, self.cores, self.slots


@dataclass(frozen=True)
class Inventory:
    """The nodes of a cluster, real or ``assumed``. ``attached``: the cluster was started before the run.

    ``waited_s``: the time that the run has waited for more nodes, in vain; None if it did not, or all came.
    """

    nodes: tuple[Node, ...]
    assumed: bool = False
    attached: bool = False
    waited_s: float | None = None

    @classmethod
    def assume(cls, nodes: int, gpus: int, cores: int = 64, device: KnownDevice | None = None) -> Inventory:
        """Return an assumed cluster to plan for: n nodes with these GPUs each, or with CPU cores if there is no GPU."""
        model, memory = (device.name, device.memory_bytes) if device else (None, None)
        names = (f"assumed-{i}" for i in range(nodes))
        return cls(
            tuple(Node(name, name, name, cores, gpus, model, gpu_memory_bytes=memory) for name in names), assumed=True
        )

    def with_gpu_memory(self, gb: float | None) -> Inventory:
        """Return the same nodes, whose GPUs have this memory in units of 10^9 bytes, unless it is None."""
        if gb is None:
            return self
        memory = int(gb * 10**9)
        nodes = tuple(replace(node, gpu_memory_bytes=memory) if node.gpus else node for node in self.nodes)
        return replace(self, nodes=nodes)

    def __str__(self) -> str:
        count = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        gpus = sum(node.gpus for node in self.nodes)
        models = sorted({node.gpu_model for node in self.nodes if node.gpu_model})
        named = f" ({', '.join(models)})" if models else ""
        devices = f"{gpus} GPUs{named}" if gpus else "no GPU"
        cores = sum(node.cores for node in self.nodes)
        return f"{'assumed: ' * self.assumed}{count}, {cores} CPU cores, {devices}"


@dataclass(frozen=True)
class Machine:
    """The part of an inventory that one experiment uses: kind of device, devices of each node, threads a device.

    ``single_machine``: the driver's own machine, not a cluster that a scheduler shares between users.
    ``waited_s``: as in the inventory.
    """

    device: str
    threads_per_device: int
    devices_per_node: tuple[int, ...]
    compiler: bool
    cpus_per_device: float = 1.0
    single_machine: bool = True
    waited_s: float | None = None

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return sum(self.devices_per_node)

    def holds(self, nodes: int, per_node: int) -> bool:
        """Return whether at least ``nodes`` nodes have at least ``per_node`` devices each."""
        return sum(1 for devices in self.devices_per_node if devices >= per_node) >= nodes

    def fewest_nodes(self, devices: int) -> int | None:
        """Return the least number of nodes that hold the devices, split evenly; None if no number does."""
        for nodes in range(1, len(self.devices_per_node) + 1):
            if devices % nodes == 0 and self.holds(nodes, devices // nodes):
                return nodes
        return None


def resolve(inventory: Inventory, *, request: str, device_counts: Sequence[int], emulated: bool = False) -> Machine:
    """Return the machine for a requested kind of device and the device counts of the grid.

    Threads per device are the same for every strategy. On CPU: cores / largest device count that a node can hold, at
    least 1. On GPU: cores / GPUs, at most 8. If computing is ``emulated``, which occupies no core, a node has as many
    CPU slots as Ray offers, of one thread each.
    """
    device = request if request != "auto" else "cuda" if any(n.gpus for n in inventory.nodes) else "cpu"
    nodes = inventory.nodes
    if device == "cuda":
        threads = min((n.cores // n.gpus for n in nodes if n.gpus), default=1)
        threads = max(1, min(MAX_THREADS_PER_GPU, threads))
        per_node = tuple(n.gpus for n in nodes)
        # requested from Ray: never more than there are, even if a node has fewer cores than GPUs
        cpus = min((min(threads, n.cores / n.gpus) for n in nodes if n.gpus), default=1.0)
    elif emulated:
        threads, cpus, per_node = 1, 1.0, tuple(n.cores if n.slots is None else n.slots for n in nodes)
    else:
        cores = min((n.cores for n in nodes), default=0)
        most = max((d for d in device_counts if d <= cores), default=1)
        threads = max(1, cores // most)
        per_node = tuple(n.cores // threads for n in nodes)
        cpus = float(threads)
    single = len(nodes) == 1 and not inventory.attached
    return Machine(device, threads, per_node, all(n.compiler for n in nodes), cpus, single, inventory.waited_s)
