"""One process drives every device; the model is copied to them at each forward pass."""

from __future__ import annotations

from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.strategies.base import Strategy, WrapContext
from harness.train.strategies.cpu_replicas import ReplicatedModule


class DataParallel(Strategy):
    """nn.DataParallel on CUDA; an emulation on CPU, where nn.DataParallel would run the bare module."""

    traits = BUILTIN_TRAITS["dp"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Return the model inside its wrapper, on the first device."""
        devices = context.devices
        model = model.to(devices[0])
        if devices[0].type == "cuda":
            return nn.DataParallel(model, device_ids=[device.index or 0 for device in devices])
        return ReplicatedModule(model, len(devices))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper."""
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner
