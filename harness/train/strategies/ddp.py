"""One process a device; gradients are averaged over the ranks while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.strategies.base import Strategy, WrapContext

HOOKS: Mapping[str, Callable[..., object] | None] = {
    "none": None,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
}
"""How gradients are exchanged: in float32, or rounded before and cast back after."""


class Ddp(Strategy):
    """torch's DistributedDataParallel."""

    traits = BUILTIN_TRAITS["ddp"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Return the model inside DistributedDataParallel with the options of the experiment."""
        settings = {name: value for name, value in context.options.items() if name != "backend"}
        hook = HOOKS[str(settings.pop("comm_hook", "none"))]
        if settings.pop("sync_batch_norm", False):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        device = context.devices[0]
        model = model.to(device)
        arguments: dict[str, Any] = settings
        wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **arguments)
        if hook:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper."""
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Return DDP's no_sync() unless ``enabled``."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()
