"""How each strategy wraps a model. How many processes it needs is in harness.placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from harness.train.strategies import ddp, dp, fsdp, single
from harness.train.strategies.base import Units

Wrap = Callable[[nn.Module, Sequence[torch.device], Mapping[str, Any], Units], nn.Module]

STRATEGIES: Mapping[str, Wrap] = {
    "single": single.wrap,
    "dp": dp.wrap,
    "ddp": ddp.wrap,
    "fsdp": fsdp.wrap,
}
