"""Healthy workloads that look like faulty ones."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Subset, TensorDataset, random_split

from tests.doctor.faulty_steps import CountsPadding, GeneratorInAModule, area
from tests.doctor.healthy import CLASSES, WIDTH, Healthy, Net, OwnSamples, blobs


class CountsTokens(CountsPadding):
    """Padding is neither in the loss nor in its weight."""

    real = True


class BoundsItsWeights(Healthy):
    """Forward changes a weight: it keeps its norm, and takes no step."""

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.data.div_(self.first.weight.norm().clamp(min=1.0))
            return super().forward(x)


class PlainConstants(Healthy):
    """Plain tensors that are the same under every seed: mean and spread of the data, positions, class weights."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = torch.full((8,), 2.0), torch.full((8,), 1.9)
            self.positions, self.weights = torch.arange(8.0).sin(), torch.tensor([1.0, 2.0, 1.0])

        def forward(self, x: Tensor) -> Tensor:
            standard = (x - self.mean.to(x.device)) / self.spread.to(x.device)
            return super().forward(standard + self.positions.to(x.device)) * self.weights.to(x.device)


class GradientPenalty(Healthy):
    """A term of the gradient of the loss in its input, which wants a gradient for that."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        x = x.clone().requires_grad_()
        scores = model(x)
        slope = 0.0
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            slope = 0.01 * gradient.square().sum()
        return cross_entropy(scores, y, reduction="sum") + slope, torch.tensor(float(len(y)))


class FrozenBackbone(Healthy):
    def build_model(self) -> nn.Module:
        model = Net()
        model.first.requires_grad_(False)
        return model


class FrozenNorm(Healthy):
    """The statistics of a pretrained norm are kept, while the rest is in train mode."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH)
            self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

        def train(self, mode: bool = True) -> FrozenNorm.Net:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.norm(self.first(x))))


class OwnNorm(nn.Module):
    """Batch normalisation as a user writes it, with running statistics that are changed in place or replaced."""

    def __init__(self, width: int, how: str = "in place") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training and self.how != "constant":
            mean, variance = x.mean(dim=0), x.var(dim=0, unbiased=False)
            if self.how == "in place":
                self.mean.mul_(0.9).add_(0.1 * mean.detach())
                self.variance.mul_(0.9).add_(0.1 * variance.detach())
            else:
                self.mean = 0.9 * self.mean + 0.1 * mean.detach()
                self.variance = 0.9 * self.variance + 0.1 * variance.detach()
        return (x - mean) / (variance + 1e-5).sqrt()


class OwnBatchNorm(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = OwnNorm(8), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))


class KeepsItsLastOutput(Healthy):
    """For a picture: nothing depends on it."""

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.shown = out.detach().mean(dim=0)
            return out


class KeepsNumbers(Healthy):
    def __init__(self) -> None:
        self.history: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        self.history.append(total.detach())
        return total, weight


class ProperSplit(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        return tuple(random_split(blobs(), [192, 64], generator=torch.Generator().manual_seed(1)))


class AveragedWeights(ProperSplit):
    """A copy of the model, whose weights are an average and which evaluates."""

    def after_step(self, model: nn.Module, step: int) -> None:
        if not step:
            self.average = AveragedModel(model)
        self.average.update_parameters(model)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        average = getattr(self, "average", model)
        average.eval()
        return {"accuracy": ((average(x).argmax(dim=1) == y).sum(), len(y))}


class SplitSlices(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        x, y = blobs().tensors
        return TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])


class FewValues(ProperSplit):
    """Samples of few possible values: those of both sets are equal without a copy."""

    def datasets(self) -> tuple[Any, Any]:
        train, validation = ([((x > 0).float(), y) for x, y in part] for part in super().datasets())
        return train, validation


class EverySecondSample(Healthy):
    """A part of the data on purpose."""

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, range(0, 256, 2)), data


class NoiseByIndex(OwnSamples):
    """Each sample has noise of its own, the same in every epoch. The net is large, as seeding takes time."""

    def build_model(self) -> nn.Module:
        middle = nn.Linear(1500, 1500)
        return nn.Sequential(nn.Linear(8, 1500), nn.ReLU(), middle, nn.ReLU(), nn.Linear(1500, CLASSES))

    @staticmethod
    def read(data: Any, index: int) -> Any:
        random.seed(index)
        x, y = data[index]
        return x + random.gauss(0.0, 0.1), y


class SlowlyOpened(OwnSamples):
    """Only the first sample of a process takes long; the others take as long as they did."""

    opened = False

    @staticmethod
    def read(data: Any, index: int) -> Any:
        time.sleep(0.0002 if SlowlyOpened.opened else 0.1)
        SlowlyOpened.opened = True
        return data[index]


class NoiseOfEachRank(GeneratorInAModule):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.generators["noise"].manual_seed(dist.get_rank())  # type: ignore[index, union-attr]
        return model


class MetricsThatAdd(ProperSplit):
    """Means over samples, over pixels or the like, a ratio of sums, and what is no mean in evaluate()."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        x, y = batch
        found, wanted = model(x).argmax(1) == 0, y == 0
        overlap = ((found & wanted).sum(), (found | wanted).sum())
        right = (model(x).argmax(1) == y).sum()
        return {"accuracy": (right, len(y)), "error": (x.square().sum(), x.numel()), "iou": overlap}

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, Any]:
        scores, labels = zip(*((model(x)[:, 0], y) for x, y in loader), strict=True)
        return {"auroc": area(torch.cat(scores), torch.cat(labels) == 0)}


class MetricsThatDraw(ProperSplit):
    """Noise of a batch of its own, as in a denoising model: no two splits have the same."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        x, _ = batch
        return {"denoising": ((model(x + torch.randn(len(x), 1)) - model(x)).square().sum(), len(x))}


class MasksInCollate(ProperSplit):
    def collate(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return x * (torch.rand_like(x) > 0.2), y

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        x, _ = batch
        return {"energy": (x.square().sum(), len(x))}


HEALTHY: list[tuple[type[Healthy], str]] = [
    *product((CountsTokens, FrozenNorm), ("single", "ddp")),
    *product((BoundsItsWeights, PlainConstants, GradientPenalty, KeepsNumbers, NoiseByIndex), ("single",)),
    *product((ProperSplit, SplitSlices, FewValues), ("single",)),
    *product((MetricsThatAdd,), ("single", "ddp")),
    *product((MetricsThatDraw, MasksInCollate), ("single",)),
    *product((FrozenBackbone, KeepsItsLastOutput, AveragedWeights), ("ddp",)),
    (EverySecondSample, "dp"),
    *product((OwnBatchNorm,), ("single", "dp", "ddp", "fsdp")),
    *product((SlowlyOpened,), ("single",)),
    (NoiseOfEachRank, "ddp"),
]
