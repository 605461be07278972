"""One process a device; gradients are averaged over the ranks while backward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from harness.config.strategy_traits import BUILTIN_TRAITS, DdpOptions
from harness.train.strategies.base import ExchangePoint, Report, WrapContext, Wrapping

Hook = Callable[..., torch.futures.Future[torch.Tensor]]
"""Takes the process group (None: all ranks) and a bucket; returns a future of the averaged gradients."""
HOOKS: Mapping[str, Hook | None] = {
    "none": None,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
}
"""How gradients are exchanged: in float32, or rounded before and cast back after."""
NEWER = "forward_sync_buffers"
DEFAULT_MB = DdpOptions().bucket_cap_mb[0]
WITHOUT_BROADCASTS = NEWER if NEWER in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
"""The argument that turns the broadcast of buffers off: torch 2.14 deprecates its name before."""


def broadcasts_buffers(model: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether a step sends the buffers of rank 0 to the others before its forward pass."""
    is_ddp = isinstance(model, DistributedDataParallel)
    return is_ddp and bool(getattr(model, WITHOUT_BROADCASTS, False)) and bool(model.modules_buffers)


class Ddp(Wrapping):
    """torch's DistributedDataParallel."""

    traits = BUILTIN_TRAITS["ddp"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        return _wrapped(model, context, _hook_of(context))

    def observed(self, model: nn.Module, context: WrapContext, report: Report) -> nn.Module:
        """Return the model in a new wrapper whose hook reports each bucket, and then exchanges it as the cell does."""
        own = _hook_of(context)
        hook: Hook = own or default_hooks.allreduce_hook

        def run(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            report(_point_of(bucket.buffer(), group, halved=own is not None))
            return hook(group, bucket)

        # DDP rejects a hook whose annotations are not its own
        return _wrapped(model, context, lambda group, bucket: run(group, bucket))

    def compiled_part(self, model: nn.Module) -> nn.Module:
        """Return the module inside the wrapper, where dynamo stops: torch's own layers would not be compiled at all."""
        return self.unwrap(model)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()


def _point_of(gradients: torch.Tensor, group: dist.ProcessGroup | None, *, halved: bool) -> ExchangePoint:
    """Return the point of a bucket; ``halved``: a hook exchanges 16 bits of each number.

    The backends exchange a sparse gradient coalesced: each row that a rank has once, with its number.
    """
    if gradients.is_sparse:
        rows = gradients.coalesce()
        given = sum(part.numel() * part.itemsize for part in (rows.indices(), rows.values()))
        return ExchangePoint("rows", gather_bytes=given * dist.get_world_size(group))
    return ExchangePoint("bucket", reduce_bytes=gradients.numel() * (2 if halved else gradients.itemsize))


def _hook_of(context: WrapContext) -> Hook | None:
    """Return the hook that the options name, each of which compresses to 16 bits; None for DDP's own exchange."""
    return HOOKS[str(context.options.get("comm_hook", "none"))]


def _wrapped(model: nn.Module, context: WrapContext, hook: Hook | None) -> nn.Module:
    arguments: dict[str, Any] = {
        name: value for name, value in context.options.items() if name not in ("backend", "comm_hook")
    }
    if arguments.pop("sync_batch_norm", False):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not arguments.pop("broadcast_buffers", True):
        arguments[WITHOUT_BROADCASTS] = False
    if arguments.get("bucket_cap_mb") == DEFAULT_MB:  # given, the first bucket would be as large, and sent later
        del arguments["bucket_cap_mb"]
    device = context.devices[0]
    model = model.to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **arguments)
    if hook:
        wrapped.register_comm_hook(None, hook)
    return wrapped
