"""One rank of a worker group and its collectives. Used between windows, never inside one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

# its functions keep the default group of the time of their import: after the ranks have connected, that would be the
# group of all of them, even in a pass on one device
import torch.distributed.nn.functional

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank, its node and its devices. Its collectives use the CPU backend (gloo)."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    node_id: str
    address: str
    devices: tuple[torch.device, ...]

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.sum([0.0])

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        size = self.world_size
        values: list[T] = [value] * size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]
