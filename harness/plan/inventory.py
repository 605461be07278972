"""The inventory of nodes and devices, GPUs by name with their memory, and the machine of one experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import closest


@dataclass(frozen=True)
class KnownDevice:
    """A GPU as its vendor lists it. ``gb``: memory in units of 10^9 bytes; ``source``: title of the document.

    ``drivers``: the names by which the driver reports it, as in ``torch.cuda.get_device_properties().name``.
    """

    name: str
    gb: int
    source: str
    drivers: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """The stated memory in bytes; what a driver reports may differ by some percent."""
        return self.gb * 10**9


_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_P100 = "NVIDIA Tesla P100 GPU accelerator data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"

_DEVICES = (
    KnownDevice("P100-12GB", 12, _P100, ("Tesla P100-PCIE-12GB",)),
    KnownDevice("P100-16GB", 16, _P100, ("Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB")),
    KnownDevice("V100-16GB", 16, _V100, ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB")),
    KnownDevice("V100-32GB", 32, _V100, ("Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB", "Tesla V100-SXM3-32GB")),
    KnownDevice("T4-16GB", 16, "NVIDIA T4 Tensor Core GPU data sheet", ("Tesla T4",)),
    KnownDevice("A100-40GB", 40, _A100, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    KnownDevice("A100-80GB", 80, _A100, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    KnownDevice("A2-16GB", 16, "NVIDIA A2 Tensor Core GPU data sheet", ("NVIDIA A2",)),
    KnownDevice("A10-24GB", 24, "NVIDIA A10 Tensor Core GPU data sheet", ("NVIDIA A10",)),
    KnownDevice("A10G-24GB", 24, "Amazon EC2 G5 instances, product page", ("NVIDIA A10G",)),
    # a board has four such GPUs
    KnownDevice("A16-16GB", 16, "NVIDIA A16 GPU data sheet", ("NVIDIA A16",)),
    KnownDevice("A30-24GB", 24, "NVIDIA A30 Tensor Core GPU data sheet", ("NVIDIA A30",)),
    KnownDevice("A40-48GB", 48, "NVIDIA A40 data center GPU data sheet", ("NVIDIA A40",)),
    KnownDevice("L4-24GB", 24, "NVIDIA L4 Tensor Core GPU data sheet", ("NVIDIA L4",)),
    KnownDevice("L40-48GB", 48, "NVIDIA L40 GPU data sheet", ("NVIDIA L40",)),
    KnownDevice("L40S-48GB", 48, "NVIDIA L40S GPU data sheet", ("NVIDIA L40S",)),
    KnownDevice("H100-80GB", 80, _H100, ("NVIDIA H100 80GB HBM3",)),
    KnownDevice("H100-80GB-PCIe", 80, "NVIDIA H100 PCIe GPU product brief", ("NVIDIA H100 PCIe",)),
    KnownDevice("H100-94GB-NVL", 94, _H100, ("NVIDIA H100 NVL",)),
    KnownDevice("H200-141GB", 141, _H200, ("NVIDIA H200",)),
    KnownDevice("H200-141GB-NVL", 141, _H200, ("NVIDIA H200 NVL",)),
    KnownDevice("H20-96GB", 96, "Hugging Face, hardware page of the H20", ("NVIDIA H20",)),
    KnownDevice("GH200-96GB", 96, _GH200, ("NVIDIA GH200 480GB",)),
    KnownDevice("GH200-144GB", 144, _GH200, ("NVIDIA GH200 144G HBM3e",)),
    # 1,440 GB of eight
    KnownDevice("B200-180GB", 180, "NVIDIA DGX B200 data sheet", ("NVIDIA B200",)),
    KnownDevice("B300-288GB", 288, "Glenn K. Lockwood, page of the B300", ("NVIDIA B300 SXM6 AC",)),
    KnownDevice("GB200-186GB", 186, "NVIDIA GB200 NVL72, product page", ("NVIDIA GB200",)),
    KnownDevice("RTX-3080-10GB", 10, _AMPERE, ("NVIDIA GeForce RTX 3080",)),
    KnownDevice("RTX-3090-24GB", 24, _AMPERE, ("NVIDIA GeForce RTX 3090",)),
    KnownDevice("RTX-4080-16GB", 16, _ADA, ("NVIDIA GeForce RTX 4080",)),
    KnownDevice("RTX-4090-24GB", 24, _ADA, ("NVIDIA GeForce RTX 4090",)),
    KnownDevice("RTX-5080-16GB", 16, _BLACKWELL, ("NVIDIA GeForce RTX 5080",)),
    KnownDevice("RTX-5090-32GB", 32, _BLACKWELL, ("NVIDIA GeForce RTX 5090",)),
    KnownDevice("RTX-A5000-24GB", 24, "NVIDIA RTX A5000 data sheet", ("NVIDIA RTX A5000",)),
    KnownDevice("RTX-A6000-48GB", 48, "NVIDIA RTX A6000 data sheet", ("NVIDIA RTX A6000",)),
    KnownDevice("RTX-5000-Ada-32GB", 32, "NVIDIA RTX 5000 Ada Generation data sheet"),
    KnownDevice("RTX-6000-Ada-48GB", 48, "NVIDIA RTX 6000 Ada Generation data sheet"),
    KnownDevice("MI100-32GB", 32, "AMD Instinct MI100 accelerator data sheet"),
    KnownDevice("MI210-64GB", 64, "AMD Instinct MI210 accelerator data sheet"),
    # a module has two such devices
    KnownDevice("MI250X-64GB", 64, "AMD Instinct MI250X accelerator data sheet"),
    KnownDevice("MI300X-192GB", 192, "AMD Instinct MI300X accelerator data sheet", ("AMD Instinct MI300X",)),
)
KNOWN_DEVICES: Mapping[str, KnownDevice] = {device.name: device for device in _DEVICES}


def device_named(name: str) -> KnownDevice:
    """Return the device of a name, upper or lower case.

    Raises ValueError, with the choices if several memories or boards have the name, or with the nearest names.
    """
    found = next((device for device in _DEVICES if device.name.casefold() == name.casefold()), None)
    if found:
        return found
    alike = [device.name for device in _DEVICES if device.name.casefold().startswith(f"{name.casefold()}-")]
    if alike:
        memories = "one of" if len(alike) > 1 else "its name with the memory,"
        raise ValueError(f"got the device {name[:40]!r}; give {memories} {', '.join(alike)}")
    near = closest(name, KNOWN_DEVICES)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"got the unknown device {name[:40]!r}; {hint}(allowed: {', '.join(KNOWN_DEVICES)})")


def device_of_driver(model: str) -> KnownDevice | None:
    """Return the device that the driver reports by this name; None if the table lacks it."""
    return next((device for device in _DEVICES if model in device.drivers), None)


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
