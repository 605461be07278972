"""One process a device; parameters, gradients and optimizer state are sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Options
from harness.train.strategies.base import Strategy, Units


class Fsdp(Strategy):
    """torch's fully_shard, which modifies a model in place."""

    traits = BUILTIN_TRAITS["fsdp"]

    def wrap(self, model: nn.Module, devices: Sequence[torch.device], options: Options, units: Units) -> nn.Module:
        """Apply fully_shard to each unit, then to the whole. All ranks must hold the same parameters before."""
        # imported here: the import takes most of a second, which worker groups without fsdp save
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        settings: dict[str, Any] = dict(options)
        if settings.pop("sync_batch_norm", False):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = model.to(devices[0])
        mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
        for unit in units(model):
            if any(parameter.requires_grad for parameter in unit.parameters()):
                fully_shard(unit, mesh=mesh, **settings)
        fully_shard(model, mesh=mesh, **settings)
        return model

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Set whether the backward passes that follow reduce gradients; the setting remains after the context."""
        model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
        return nullcontext()
