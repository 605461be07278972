"""One rank of a worker group: its collectives, used between windows only, and the processors that it is pinned to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

# its functions keep the default group of the time of their import: after the ranks have connected, that would be the
# group of all of them, even in a pass on one device
import torch.distributed.nn.functional

from harness.system.process import variables

T = TypeVar("T")
Cache = MutableMapping[Hashable, Any]
"""What a process keeps from one trial to the next: data sets, peaks, counts, rules."""
LOADER_WORKERS = "loader workers"
"""Its key of the numbers that the doctor decided on, by ``Cell.loader_key``."""


class StoreExchange:
    """Collectives of Python values through a store, to which each rank holds one connection.

    gloo connects a rank with about log n others of n, and the first with all. A rank whose peer has ended waits until
    the store's timeout, or until its group is ended.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size, self._number = store, rank, size, 0
        self._sent: list[str] = []
        """Keys of broadcasts, which the others may not have read yet."""

    def broadcast(self, value: T) -> T:
        key = self._key()
        if self._rank:
            received: T = pickle.loads(self._store.get(key))  # from our own ranks
            return received
        self._store.set(key, pickle.dumps(value))
        self._sent.append(key)
        return value

    def gather_to_first(self, value: T) -> list[T]:
        key = self._key()
        if self._rank:
            self._store.set(f"{key}/{self._rank}", pickle.dumps(value))
            return [value]
        keys = [f"{key}/{rank}" for rank in range(1, self._size)]
        values = [value, *map(pickle.loads, self._store.multi_get(keys))]
        for read in (*keys, *self._sent):  # whoever is here has read what was sent before
            self._store.delete_key(read)
        self._sent.clear()
        return values

    def _key(self) -> str:
        self._number += 1
        return f"exchange/{self._number}"


@dataclass(frozen=True)
class Ranks:
    """This rank, its node and its devices. Its collectives use the CPU backend (gloo), or a store between nodes."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    node_id: str
    address: str
    devices: tuple[torch.device, ...]
    group: dist.ProcessGroup | None = None
    """The process group of its collectives; None: the default one."""
    exchange: StoreExchange | None = None
    """What its collectives use in place of a process group."""

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
        if self.exchange:
            return self.exchange.broadcast(value)
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        if self.exchange:
            return self.broadcast(self.gather_to_first(value))
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks, on rank 0; on the others only their own."""
        if self.world_size == 1:
            return [value]
        if self.exchange:
            return self.exchange.gather_to_first(value)
        values: list[T] = [value] * self.world_size if self.first else [value]
        dist.gather_object(value, values if self.first else None, dst=0, group=self.group)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the ranks."""
        if self.exchange:
            return [sum(column) for column in zip(*self.gather(values), strict=True)]
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return [float(value) for value in total.tolist()]


@contextmanager
def connecting_on_use(backend: str) -> Iterator[None]:
    """Have gloo, in process groups made inside, connect two ranks when they first exchange something.

    By default it connects each rank with all others at once: with n ranks n (n - 1) / 2 sockets, most of them unused,
    since a collective's ring and tree need about log n for each rank. Only for a ``backend`` with NCCL, beside which
    gloo has the harness's own small messages on one node, and between nodes those of a doctor's checks: with gloo alone
    connections would fall into the training.
    """
    # the user's own groups are made as ever
    with variables({"TORCH_GLOO_LAZY_INIT": "1"} if "nccl" in backend else {}):
        yield


def pinned() -> frozenset[int]:
    """Return the processors that the calling thread is pinned to; empty if it may use all, or if that is not known."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return frozenset(allowed) if len(allowed) < (os.cpu_count() or 1) else frozenset()


def processors() -> int:
    """Return the number of processors that this process may use."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None  # macOS has none
    return len(allowed) if allowed else psutil.cpu_count() or 1


def crowded(ranks: Sequence[tuple[frozenset[int], int]]) -> frozenset[int]:
    """Return processors that several ranks of a node are pinned to, with more threads than processors; empty if none.

    ``ranks``: the processors that each is pinned to, and the number of its computing threads.
    """
    for shared in sorted({one | other for one, _ in ranks for other, _ in ranks if one & other}, key=len):
        inside = [threads for own, threads in ranks if own and own <= shared]
        if len(inside) > 1 and sum(inside) > len(shared):
            return shared
    return frozenset()


def crowding(ranks: Ranks) -> list[str]:
    """Return the crowded processors of this rank as a setting. Every rank calls it, in the thread that trains."""
    threads = 1 if ranks.devices[0].type == "cuda" else torch.get_num_threads()  # with a GPU one thread launches
    gathered = ranks.gather((ranks.node_rank, pinned(), threads))
    here = [(own, n) for node, own, n in gathered if node == ranks.node_rank]
    shared = pinned() & crowded(here)
    return [f"processors {'/'.join(map(str, sorted(shared)))} shared by ranks"] if shared else []
