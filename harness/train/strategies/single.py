"""The bare model on one device: what every ratio is against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from harness.train.strategies.base import Units


def wrap(model: nn.Module, devices: Sequence[torch.device], options: Mapping[str, Any], units: Units) -> nn.Module:
    """The model itself, on its device."""
    return model.to(devices[0])
