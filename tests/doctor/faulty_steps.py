"""Workloads with a fault in what their steps do beside the optimizer, in their data or in what loss() returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset

from tests.doctor.healthy import CLASSES, Healthy, blobs

# -- what loss() returns


class ScaledByWorldSize(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        return total * (dist.get_world_size() if dist.is_initialized() else 1), weight


class MeanOfWeightOne(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return cross_entropy(model(x), y), torch.tensor(1.0)


class LossAlone(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)[0]


class LossAsANumber(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, weight = super().loss(model, batch)
        return total.item(), weight


class LossesOfSamples(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, reduction="none"), torch.tensor(float(len(y)))


# -- data


class NoSamples(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        return Subset(blobs(), []), blobs()


class SamplerInASubset(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, list(DistributedSampler(data, num_replicas=4, rank=1))), blobs()


class OneNoiseForAll(Healthy):
    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.data = blobs()

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            torch.manual_seed(0)
            x, y = self.data[index]
            return x + 0.1 * torch.randn(8), y

    def datasets(self) -> tuple[Any, Any]:
        return self.Data(), blobs()


class ValidatesOnTraining(Healthy):
    epochs = True


class OverlappingSplit(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, range(192)), Subset(data, range(128, 256))


class OverlappingSlices(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        x, y = blobs().tensors
        return TensorDataset(x[:192], y[:192]), TensorDataset(x[128:], y[128:])


class NothingToValidate(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return data, Subset(data, [])


class CountsPadding(Healthy):
    """Token sequences whose padding is in the loss and in its weight."""

    unit = "tokens"
    real = False

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.last(self.embed(tokens))
            return out

    def build_model(self) -> nn.Module:
        return self.Net()

    def datasets(self) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 30, (128,), generator=generator)
        data = [torch.randint(1, 20, (int(n),), generator=generator) for n in lengths]
        return data, data[:64]

    def collate(self, samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        wanted = batch % CLASSES
        if self.real:
            wanted = torch.where(batch == 0, -1, wanted)
        total = cross_entropy(model(batch).flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-1)
        return total, (wanted >= 0).sum().float()


FAULTS: dict[str, list[tuple[type[Healthy], str]]] = {
    "gradient scaling": [(ScaledByWorldSize, "ddp")],
    "loss weight": [(MeanOfWeightOne, strategy) for strategy in ("single", "dp", "ddp")],
    "execution": [(LossAlone, "single"), (LossAsANumber, "ddp"), (LossesOfSamples, "single")],
    "data sharding": [(NoSamples, "single"), (SamplerInASubset, "dp"), (OneNoiseForAll, "single")],
    "validation set": [
        (ValidatesOnTraining, "single"),
        (OverlappingSplit, "single"),
        (OverlappingSlices, "single"),
        (NothingToValidate, "single"),
    ],
    "padding": [(CountsPadding, "single")],
}
"""The check that must name the fault -> workloads that have it, and under which strategy."""
