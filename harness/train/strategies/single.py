"""The bare model on one device, the base of every ratio."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Options
from harness.train.strategies.base import Strategy, Units


class Single(Strategy):
    """The model itself, on its device."""

    traits = BUILTIN_TRAITS["single"]

    def wrap(self, model: nn.Module, devices: Sequence[torch.device], options: Options, units: Units) -> nn.Module:
        """Return the model itself, on its device."""
        return model.to(devices[0])
