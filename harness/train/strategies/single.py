"""The bare model on one device, the base of every ratio."""

from __future__ import annotations

from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.strategies.base import Strategy, WrapContext


class Single(Strategy):
    """The model itself, on its device."""

    traits = BUILTIN_TRAITS["single"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Return the model itself, on its device."""
        return model.to(context.devices[0])
