"""Right recipes that a check cannot compare, or compares in its own way: no finding, and a reason if it is unknown."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu
from torch.utils.data import default_collate

from tests.doctor.healthy import CLASSES, Healthy, Net, Samples


class MixesUp(Healthy):
    """Mixup in collate, as most recipes have it: NumPy's generator, and a permutation of torch's."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(x))
        y = one_hot(y, CLASSES).float()
        return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]


class MixesUpOnItsOwn(Healthy):
    """The same from a generator that no seed reaches."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * float(self.generator.uniform(0.5, 1.0)), y


class PadsInCollate(Healthy):
    """A collate that draws nothing: its gradients are compared."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return torch.cat([x[:, :4], x[:, 4:]], dim=1), y


class InTrainModeAlone(Healthy):
    """Losses in train mode, predictions in eval mode, as in torchvision's detection."""

    dropout = 0.0

    class Net(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            scores = super().forward(x)
            return {"loss": cross_entropy(scores, y, reduction="sum")} if self.training else [scores.argmax(dim=1)]

    def build_model(self) -> nn.Module:
        model = self.Net()
        model.drop = nn.Dropout(self.dropout) if self.dropout else nn.Identity()
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses = model(*batch)
        return sum(losses.values()), torch.tensor(float(len(batch[1])))


class InTrainModeWithDropout(InTrainModeAlone):
    dropout = 0.1


class Graph:
    """A sample of a class that nothing else knows, as PyG's Data."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = {"x": x, "y": y, "tags": {"a", "b"}}
        self.owner = self  # a cycle, as there


class LockedGraph(Graph):
    """One that pickle refuses."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.lock = threading.Lock()


class Graphs(Healthy):
    sample: type[Graph] = Graph

    def datasets(self) -> tuple[Any, Any]:
        sample = self.sample
        data = Samples(lambda data, index: sample(*data[index]))
        return data, data

    def collate(self, samples: list[Any]) -> Any:
        return default_collate([(one.store["x"], one.store["y"]) for one in samples])


class LockedGraphs(Graphs):
    sample = LockedGraph


class SparseTable(Healthy):
    """An embedding with sparse gradients."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            places = (10 * x.abs()).long().clamp(max=49)
            return super().forward(x + self.table(places).mean(dim=1))


class CountsInBuffers(Healthy):
    """Buffers that all ranks change alike or none does, and batch statistics, which differ by design."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 600), nn.BatchNorm1d(600), nn.Linear(600, CLASSES)
            self.middle = nn.Linear(600, 600)
            self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))
            self.register_buffer("offset", torch.full((8,), 0.5))
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.num_batches_tracked += 1
            self.step = self.step + 1
            return self.last(relu(self.middle(relu(self.norm(self.first(x + self.offset))))))


HEALTHY: list[tuple[type[Healthy], str]] = [
    *((InTrainModeAlone, strategy) for strategy in ("single", "ddp", "fsdp")),
    *product((Graphs, SparseTable), ("single", "ddp")),
    *product((MixesUp, MixesUpOnItsOwn, PadsInCollate, InTrainModeWithDropout), ("ddp",)),
    *product((LockedGraphs, CountsInBuffers), ("ddp",)),
    (MixesUp, "dp"),
]
GRADIENTS, SAMPLES = "equivalence of gradients", "comparison of samples"
UNKNOWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("MixesUp ddp", "MixesUp dp"), (GRADIENTS, "unknown: collate draws random numbers")),
    "MixesUpOnItsOwn ddp": (GRADIENTS, "unknown: a batch changes when it is read again"),
    "InTrainModeWithDropout ddp": (GRADIENTS, "unknown: loss() fails in eval mode: AttributeError"),
    "LockedGraphs ddp": (SAMPLES, "unknown: values of the type LockedGraph cannot be compared: pickle refuses them"),
}
"""Workloads that are not compared in some way: the title, and the beginning of the reason."""
