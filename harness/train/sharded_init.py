"""Initialisation of a sharded model by the random numbers that one device would draw."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def whole_draws() -> TorchDispatchMode:
    """Return a context in which a sharded tensor that is filled with random numbers gets its part of a whole draw.

    Each in-place draw happens on the host, over the whole shape, by torch's CPU generator: ranks with the same seed
    agree with each other and with one device. Host memory holds one whole parameter at a time.
    """
    return _WholeDraws()  # type: ignore[no-untyped-call]


class _WholeDraws(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        from torch.distributed.tensor import DTensor, distribute_tensor

        target = args[0] if args else None
        draws = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if not (draws and isinstance(target, DTensor)):
            return func(*args, **(kwargs or {}))
        whole = torch.empty(target.shape, dtype=target.dtype)
        func(whole, *args[1:], **(kwargs or {}))
        # src_data_rank None: each rank takes its part of its own draw, nothing is sent
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
        return target
