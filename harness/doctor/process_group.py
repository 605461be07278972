"""A process group of one rank, in which the doctor trains what it compares a strategy with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class OtherRanksNeeded(Exception):
    """A collective of the workload over ranks that do not take part in the pass."""


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Make a group of this rank alone the default one for a block; without several ranks do nothing.

    The workload's code then finds what it finds on one device: get_world_size() is 1, and a collective of its own
    waits for nobody. One over a group that the workload made earlier raises OtherRanksNeeded: it would wait for ever.
    The harness's own collectives must stay outside the block. All ranks enter it, even those that do nothing inside:
    torch numbers groups, and those that the workload makes later must have the same numbers on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # local synchronisation: the others make no group. On CUDA NCCL, since gloo lacks collectives there; the group has
    # a part of the store of its own and, as no rank is bound to a device, splits no communicator of all ranks
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    own = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    assert isinstance(own, dist.ProcessGroup)
    everyone = dist.group.WORLD
    dist.group.WORLD = own
    try:
        with _Only(own):
            yield
    finally:
        dist.group.WORLD = everyone
        dist.destroy_process_group(own)


class _Only(TorchDispatchMode):
    """Raises OtherRanksNeeded at a collective over any other group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = group.group_name

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        namespace = getattr(func, "namespace", "")
        if namespace in ("c10d", "_c10d_functional"):
            names = {_group_name(argument) for argument in (*args, *(kwargs or {}).values())}
            if others := sorted(name for name in names if name and name != self._name):
                raise OtherRanksNeeded(f"{func} in a pass on one device is over a group of several ranks ({others[0]})")
        return func(*args, **(kwargs or {}))


def _group_name(argument: Any) -> str:
    """Return the name of a process group among an operator's arguments; empty for any other argument.

    Operators of c10d take the group itself, functional ones its name, beside names of reductions.
    """
    if isinstance(argument, str):
        return argument if argument in dist.distributed_c10d._world.pg_names.values() else ""
    with suppress(RuntimeError, TypeError):  # a reduction, and what is no object of C++
        return str(dist.ProcessGroup.unbox(argument).group_name)
    return ""
