"""One process a device; gradients are averaged over the ranks while backward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.train.strategies.base import Units


def wrap(model: nn.Module, devices: Sequence[torch.device], options: Mapping[str, Any], units: Units) -> nn.Module:
    """DistributedDataParallel with the options of the experiment."""
    settings = dict(options)
    if settings.pop("sync_batch_norm", False):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    device = devices[0]
    model = model.to(device)
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)
