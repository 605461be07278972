"""A process group of one rank, in which the doctor trains what it compares a strategy with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make a group of this rank alone the default one for a block; without several ranks do nothing.

    The workload's code then finds what it finds on one device: get_world_size() is 1, and a collective of its own
    waits for nobody. The harness's own collectives must stay outside the block.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # gloo: NCCL would split the communicator of all ranks, for which each of them is needed
    own = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(own, dist.ProcessGroup)
    everyone = dist.group.WORLD
    dist.group.WORLD = own
    try:
        yield
    finally:
        dist.group.WORLD = everyone
        dist.destroy_process_group(own)
