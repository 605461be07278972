"""A user's own workload, shipped to the workers from outside the package, whose failure is configured."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class ConfiguredFault:
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
        while self.behaviour == "hangs":  # busy, and without a collective; one that sleeps is in faulty_workload.py
            time.sleep(0.001)
        if self.behaviour == "dies":
            os._exit(9)


class Killed(ConfiguredFault):
    """The last of several ranks is killed in the second epoch of a process, so many times; ``folder`` counts them.

    Dropout and batch statistics: what a training loses that forgets more than its parameters.
    """

    KILL_AT = 11  # an epoch of 64 samples in batches of 16: four steps and four evaluations

    def __init__(self, kills: int = 0, folder: str = ".") -> None:
        super().__init__()
        self.kills, self.folder = kills, Path(folder)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def _misbehave(self) -> None:
        """Called in the third call; the fatal one is later."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        last = dist.get_rank() == dist.get_world_size() - 1 > 0
        if last and self.calls + 1 == self.KILL_AT and len(list(self.folder.glob("killed-*"))) < self.kills:
            (self.folder / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
