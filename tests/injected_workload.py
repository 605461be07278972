"""A workload that computes by sleeping, so that it is steady on any machine, and goes wrong in one chosen way."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

COMPUTE_S = 0.02
SLOW_S = 0.1
LOAD_S = 0.025
"""Of a sample. A planted delay of ten steps or more is twice as long as a pause of the machine may be."""


class Samples(Dataset[Any]):
    """Random samples; ``wait_s`` passes for each where several ranks read at once, as from a shared disk."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wait_s and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(self.wait_s)
        x = torch.full((16,), index / 4096)
        return x, x.sum().unsqueeze(0)


class Injected:
    """``fault``: none, loader (sleeps), gradients (huge, for little compute) or rank1 (sleeps in its step)."""

    unit = "samples"

    def __init__(self, fault: str = "none") -> None:
        self.fault = fault

    def build_model(self) -> nn.Module:
        wide = 2500 if self.fault == "gradients" else 16
        return nn.Sequential(nn.Linear(16, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 1))

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        data = Samples(LOAD_S if self.fault == "loader" else 0.0)
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        time.sleep(COMPUTE_S)
        if self.fault == "rank1" and os.environ.get("RANK") == "1":
            time.sleep(SLOW_S)
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(x)))
