"""Healthy workloads that look like faulty ones."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from tests.doctor.faulty_steps import CountsPadding
from tests.doctor.healthy import CLASSES, Healthy, blobs


class CountsTokens(CountsPadding):
    """Padding is neither in the loss nor in its weight."""

    real = True


class ProperSplit(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        train, validation = random_split(blobs(), [192, 64], generator=torch.Generator().manual_seed(1))
        return train, validation


class SplitSlices(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        x, y = blobs().tensors
        return TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])


class EverySecondSample(Healthy):
    """A part of the data on purpose."""

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, range(0, 256, 2)), data


class NoiseByIndex(Healthy):
    """Each sample has noise of its own, the same in every epoch. The net is large, as seeding takes time."""

    def build_model(self) -> nn.Module:
        middle = nn.Linear(1500, 1500)
        return nn.Sequential(nn.Linear(8, 1500), nn.ReLU(), middle, nn.ReLU(), nn.Linear(1500, CLASSES))

    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.data = blobs()

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            random.seed(index)
            x, y = self.data[index]
            return x + random.gauss(0.0, 0.1), y

    def datasets(self) -> tuple[Any, Any]:
        return self.Data(), blobs()


HEALTHY: list[tuple[type[Healthy], str]] = [
    (CountsTokens, "single"),
    (CountsTokens, "ddp"),
    (ProperSplit, "single"),
    (SplitSlices, "single"),
    (EverySecondSample, "dp"),
    (NoiseByIndex, "single"),
]
