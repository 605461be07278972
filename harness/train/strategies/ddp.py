"""One process a device; gradients are averaged over the ranks while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Options
from harness.train.strategies.base import Strategy, Units


class Ddp(Strategy):
    """torch's DistributedDataParallel."""

    traits = BUILTIN_TRAITS["ddp"]

    def wrap(self, model: nn.Module, devices: Sequence[torch.device], options: Options, units: Units) -> nn.Module:
        """Return the model inside DistributedDataParallel with the options of the experiment."""
        settings: dict[str, Any] = dict(options)
        if settings.pop("sync_batch_norm", False):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        device = devices[0]
        model = model.to(device)
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper."""
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Return DDP's no_sync() unless ``enabled``."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()
