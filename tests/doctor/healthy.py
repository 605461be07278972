"""A healthy workload, from which the faulty ones differ by one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

CLASSES = 3
WIDTH = 600
"""Large enough for a step to take several times as long as its samples do."""


def blobs(samples: int = 256, features: int = 8) -> TensorDataset:
    """Three clouds of points."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    points = torch.randn(samples, features, generator=generator) + 2.0 * labels[:, None]
    return TensorDataset(points, labels)


def sequences() -> list[Tensor]:
    """Token sequences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (128,), generator=generator)
    return [torch.randint(1, 20, (int(n),), generator=generator) for n in lengths]


class Samples(Dataset[Any]):
    """Blobs that a function of a data set and an index reads."""

    def __init__(self, read: Callable[[Any, int], Any]) -> None:
        self.data, self.read = blobs(), read

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.read(self.data, index)


class Graph:
    """Tensors in attributes, and no method that moves them."""

    def __init__(self, x: Tensor, y: Tensor | None = None) -> None:
        self.x, self.y = x, y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Sequential(
            nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16)
        )
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(self.drop(hidden + self.middle(hidden)))


class Healthy:
    """A small net on three clouds. ``batch``: the global batch. ``epochs``: whether whole epochs are trained too."""

    unit = "samples"
    batch = 64
    epochs = False
    Net: type[nn.Module] = Net

    def build_model(self) -> nn.Module:
        return self.Net()

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(y)))


class OwnSamples(Healthy):
    """Training samples that the workload's own function reads."""

    read: Callable[[Any, int], Any]

    def datasets(self) -> tuple[Any, Any]:
        return Samples(self.read), blobs()
