"""The transfers between a placement's devices and the collectives of its ranks, as the strategies call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure.environment import describe_device
from harness.measure.topology import capture_topology, links_between
from harness.plan.environment import Topology
from harness.plan.link_rows import LinkOperation, LinkTier
from harness.train.ranks import Ranks

Call = Callable[[], object]
FLOAT_BYTES = 4
# the names of these collectives since torch 2.14, where the earlier ones warn, and before
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(frozen=True)
class Operation:
    """A transfer between two devices, or a collective of all ranks, at any size.

    ``members``: the ranks that take part. ``prepare``: given a size in bytes, allocates the buffers and returns one
    call. ``granule``: sizes are multiples of this. ``legs``: the transfers of one call, one after the other.
    ``source``, ``target``: the numbers of the two devices in the placement; None for a collective. ``link``: the link
    between two GPUs in the terms of ``nvidia-smi topo -m``; None if not known.
    """

    name: LinkOperation
    backend: str
    members: frozenset[int]
    prepare: Callable[[int], Call]
    tier: LinkTier
    granule: int = 1
    legs: int = 1
    source: int | None = None
    target: int | None = None
    link: str | None = None

    def size(self, wanted: int) -> int:
        """Return the largest multiple of the granule up to the wanted size, but at least one granule."""
        return max(self.granule, wanted // self.granule * self.granule)


@dataclass(frozen=True)
class Device:
    """One device of the placement, known on every rank."""

    node_id: str
    uuid: str | None
    topology: Topology | None
    """The links between the GPUs of its node; None without GPUs, or if they cannot be read."""


def operations_of(ranks: Ranks) -> list[list[Operation]]:
    """Return the operations by kind: copies between the devices of one process, or collectives and pairs of ranks."""
    devices = _every_device(ranks)
    if ranks.world_size == 1:
        return [copies(ranks.devices, devices)]
    backend = backend_of(ranks.devices[0].type)
    return [*collectives(ranks, backend, devices), pairs(ranks, backend, devices)]


def _every_device(ranks: Ranks) -> list[Device]:
    """Return the devices of all ranks, in the order of the ranks."""
    topology = capture_topology() if ranks.devices[0].type == "cuda" else None
    own = [Device(ranks.node_id, describe_device(device)["uuid"], topology) for device in ranks.devices]
    return [device for devices in ranks.gather(own) for device in devices]


def backend_of(device_type: str) -> str:
    """Return the backend of the process group for a type of device: nccl or gloo."""
    by_type = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return by_type[device_type]


def collectives(ranks: Ranks, backend: str, devices: Sequence[Device]) -> list[list[Operation]]:
    """Return DDP's all-reduce, and fully_shard's all-gather and reduce-scatter, which averages.

    A size is that of the whole tensor, of which each rank has a part before an all-gather or after a reduce-scatter.
    """
    device, world_size = ranks.devices[0], ranks.world_size

    def whole(size: int) -> Tensor:
        return torch.zeros(size // FLOAT_BYTES, device=device)

    def all_reduce(size: int) -> Call:
        gradient = whole(size)
        return lambda: dist.all_reduce(gradient)

    def all_gather(size: int) -> Call:
        parameters = whole(size)
        shard = parameters.new_zeros(len(parameters) // world_size)
        return lambda: getattr(dist, ALL_GATHER)(parameters, shard)

    def reduce_scatter(size: int) -> Call:
        gradient = whole(size)
        shard = gradient.new_zeros(len(gradient) // world_size)
        return lambda: getattr(dist, REDUCE_SCATTER)(shard, gradient, op=dist.ReduceOp.AVG)

    everyone = frozenset(range(world_size))
    tier = _tier(*devices)
    by_name: dict[LinkOperation, Callable[[int], Call]] = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
    }
    granule = FLOAT_BYTES * world_size
    return [[Operation(name, backend, everyone, prepare, tier, granule)] for name, prepare in by_name.items()]


def pairs(ranks: Ranks, backend: str, devices: Sequence[Device]) -> list[Operation]:
    """Return a message that is sent and returned, for each two ranks; neighbours in the ring of ranks first.

    gloo sends from the host's memory only.
    """
    device = ranks.devices[0] if backend == "nccl" else torch.device("cpu")
    size = ranks.world_size
    by_distance = sorted(
        combinations(range(size), 2), key=lambda two: (min(two[1] - two[0], size - two[1] + two[0]), two)
    )
    return [
        Operation(
            "send_receive",
            backend,
            frozenset((source, target)),
            _there_and_back(ranks.rank, source, target, device),
            _tier(devices[source], devices[target]),
            legs=2,
            source=source,
            target=target,
            link=_link(devices[source], devices[target]),
        )
        for source, target in by_distance
    ]


def _there_and_back(rank: int, source: int, target: int, device: torch.device) -> Callable[[int], Call]:
    def prepare(size: int) -> Call:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        peer = target if rank == source else source
        directions = (dist.isend, dist.irecv) if rank == source else (dist.irecv, dist.isend)

        def call() -> None:
            for direction in directions:
                # as a batch NCCL uses the communicator of all ranks, else it makes one for each pair
                for work in dist.batch_isend_irecv([dist.P2POp(direction, message, peer)]):
                    work.wait()

        return call

    return prepare


def copies(own: Sequence[torch.device], devices: Sequence[Device]) -> list[Operation]:
    """Return a copy from each GPU of this process to each other one, as nn.DataParallel makes them."""
    return [
        Operation(
            "copy",
            "cuda",
            frozenset((0,)),
            _copy(own[source], own[target]),
            "inside a node",
            source=source,
            target=target,
            link=_link(devices[source], devices[target]),
        )
        for source, target in permutations(range(len(own)), 2)
    ]


def _copy(source: torch.device, target: torch.device) -> Callable[[int], Call]:
    def prepare(size: int) -> Call:
        message = torch.zeros(size, dtype=torch.uint8, device=source)
        arrived = torch.zeros(size, dtype=torch.uint8, device=target)
        return lambda: arrived.copy_(message, non_blocking=True)

    return prepare


def _tier(*devices: Device) -> LinkTier:
    return "inside a node" if len({device.node_id for device in devices}) == 1 else "between nodes"


def _link(one: Device, other: Device) -> str | None:
    if one.node_id != other.node_id:
        return None
    links = links_between(one.topology, (one.uuid, other.uuid))
    return links[0] if links else None
