"""A user's own workload, shipped to the workers from outside the package, that fails as it is told to."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Told:
    """``behaviour``: fine, raises, hangs, dies or diverges; on rank 1 where there is one."""

    unit = "samples"

    def __init__(self, behaviour: str = "fine") -> None:
        self.behaviour = behaviour
        self.calls = 0

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == dist.get_world_size() - 1:
            self._misbehave()
        total = (model(x) - y).square().sum()
        return (total * float("nan") if self.behaviour == "diverges" else total), len(x)

    def _misbehave(self) -> None:
        if self.behaviour == "raises":
            raise ValueError("a bad sample")
        if self.behaviour == "hangs":
            time.sleep(3600)
        if self.behaviour == "dies":
            os._exit(9)
