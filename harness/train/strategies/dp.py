"""One process drives every device; the model is copied to them at each forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from harness.train.strategies.base import Units
from harness.train.strategies.cpu_replicas import ReplicatedModule


def wrap(model: nn.Module, devices: Sequence[torch.device], options: Mapping[str, Any], units: Units) -> nn.Module:
    """nn.DataParallel on CUDA. On CPU, where that passes straight through, our own replicas (emulated)."""
    model = model.to(devices[0])
    if devices[0].type == "cuda":
        return nn.DataParallel(model, device_ids=[device.index or 0 for device in devices])
    return ReplicatedModule(model, len(devices))
