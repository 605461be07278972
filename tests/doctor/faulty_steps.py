"""Workloads with a fault in what their steps do beside the optimizer, in their data or in what loss() returns."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import threading
import time
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from tests.doctor.healthy import CLASSES, Healthy, Net, OwnSamples, Samples, blobs, sequences


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


class UpdatesInLoss(Healthy):
    """Steps by hand, in front of the optimizer."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        if torch.is_grad_enabled():
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
                parameter.data.sub_(0.001 * gradient)
            total, weight = super().loss(model, batch)
        return total, weight


class UpdatesInAHook(Healthy):
    def build_model(self) -> nn.Module:
        model = Net()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)
        return model

    @staticmethod
    def update(parameter: Tensor) -> None:
        parameter.data.sub_(0.05 * parameter.grad)


class PlainWeight(Healthy):
    class Net(Net):
        trained = True

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.randn(8, requires_grad=self.trained)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.to(x.device))


class DrawnConstant(Healthy):
    class Net(PlainWeight.Net):
        trained = False


GLOBAL_WEIGHT = torch.ones(8, requires_grad=True)


class GlobalWeight(Healthy):
    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * GLOBAL_WEIGHT.to(x.device))


class OnlyBiases(Healthy):
    def build_model(self) -> nn.Module:
        model = Net()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        return model


class EvaluatesInLoss(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        model.eval()
        return super().loss(model, batch)


class OneSampleNorm(Healthy):
    batch = 1

    def build_model(self) -> nn.Module:
        shape = nn.Unflatten(1, (1, 2, 4))
        return nn.Sequential(shape, nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(32, CLASSES))


class CentresItsBatches(Healthy):
    """A mean of each rank's own batches, in a buffer, which is used."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            return super().forward(x - self.mean)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class AddsOnRankOne(Healthy):
    """What rank 1 adds to its buffer, ddp overwrites at its next forward pass."""

    class Net(Net):
        changes = 1

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and rank() == self.changes:
                self.shift.add_(0.5)
            return super().forward(x + self.shift)


class SetsOnRankOne(Healthy):
    """A buffer of an inner module is set, on which no loss depends."""

    class Head(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, CLASSES)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if rank() == 1:
                self.seen = torch.tensor(float(len(x)))
            return super().forward(x)

    def build_model(self) -> nn.Module:
        model = Net()
        model.last = self.Head()
        return model


class AddsOnRankZero(AddsOnRankOne):
    class Net(AddsOnRankOne.Net):
        changes = 0


class RemembersItsBatches(Healthy):
    """The same as a number of Python."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = 0.0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
            return super().forward(x - self.mean)


class KeepsItsGraphs(Healthy):
    def __init__(self) -> None:
        self.history: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        self.history.append(total)
        return total, weight


class LogsOnOneRank(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.05)
        return super().loss(model, batch)


class StartsAThread(Healthy):
    def build_model(self) -> nn.Module:
        threading.Thread(target=threading.Event().wait, args=(30.0,), name="metrics", daemon=True).start()
        return Net()


class StartsAProcess(Healthy):
    def build_model(self) -> nn.Module:
        self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10)"])
        return Net()


class ChangesThreads(Healthy):
    def build_model(self) -> nn.Module:
        torch.set_num_threads(2)  # each rank of these tests has one
        return Net()


class NoSamples(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        return Subset(blobs(), []), blobs()


class SamplerInASubset(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, list(DistributedSampler(data, num_replicas=4, rank=1))), blobs()


class OneNoiseForAll(OwnSamples):
    @staticmethod
    def read(data: Any, index: int) -> Any:
        torch.manual_seed(0)
        x, y = data[index]
        return x + 0.1 * torch.randn(8), y


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


class CopiedRows(Healthy):
    """Validation on copies: no tensor is shared, the values are."""

    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        x, y = blobs().tensors
        return TensorDataset(x, y), TensorDataset(x[100:150].clone(), y[100:150].clone())


class NothingToValidate(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return data, Subset(data, [])


class ValidatesApart(Healthy):
    epochs = True

    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        return Subset(data, range(192)), Subset(data, range(192, 256))


class NormalisesAdvantages(Healthy):
    """PPO's loss, with advantages that are normalised over each minibatch: of its parts they are a little others."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        advantages = x[:, 0] + 2.0
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        logarithm = -cross_entropy(model(x), y, reduction="none")
        ratio = (logarithm - logarithm.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * advantages, clipped * advantages).sum(), torch.tensor(len(x))


class OtherLabels(ValidatesApart):
    """Validation samples of a class that the model does not know."""

    def datasets(self) -> tuple[Any, Any]:
        train, validation = super().datasets()
        points, _ = next(iter(DataLoader(validation, batch_size=61)))
        return train, TensorDataset(points, torch.full((61,), CLASSES))


class LossInTrainMode(ValidatesApart):
    """Returns predictions in eval mode, as models of detection do."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if not model.training:
            raise TypeError("list indices must be integers or slices, not str")
        return super().loss(model, batch)


class NeedsExchange(Healthy):
    """Reads a state of the wrapper that it has in training alone."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if not getattr(model, "require_backward_grad_sync", True):
            raise RuntimeError("gradients are not reduced")
        return super().loss(model, batch)


class AreaByBatch(ValidatesApart):
    """The area under the ROC curve of class 0, of each batch."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        x, y = batch
        return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y)), "auroc": (area(model(x)[:, 0], y == 0), 1)}


def area(scores: Tensor, positive: Tensor) -> Tensor:
    """The share of pairs of a positive and a negative sample in which the positive one has the higher score."""
    return (scores[positive][:, None] > scores[~positive][None, :]).float().mean()


class EvaluatesToATensor(ValidatesApart):
    def evaluate(self, model: nn.Module, loader: Any) -> Any:
        return torch.stack([model(x).mean() for x, _ in loader])


class EvaluatesToNaN(ValidatesApart):
    def evaluate(self, model: nn.Module, loader: Any) -> Any:
        return {"ratio": float("nan"), "loss_of_all": sum(float(model(x).mean()) for x, _ in loader)}


class EvaluatesOnTheFirst(ValidatesApart):
    """Other ranks return nothing, as where only the first one writes a log."""

    def evaluate(self, model: nn.Module, loader: Any) -> Any:
        return {"mean": sum(float(model(x).mean()) for x, _ in loader)} if rank() == 0 else self.elsewhere()

    def elsewhere(self) -> Any:
        return {}


class EvaluatesToNoneElsewhere(EvaluatesOnTheFirst):
    def elsewhere(self) -> Any:
        return None


class CountsPadding(Healthy):
    """Token sequences whose padding is in the loss and in its weight."""

    unit = "tokens"
    real = False

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(self.embed(tokens))

    def datasets(self) -> tuple[Any, Any]:
        data = sequences()
        return data, data[:64]

    def collate(self, samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        wanted = batch % CLASSES
        if self.real:
            wanted = torch.where(batch == 0, -1, wanted)
        total = cross_entropy(model(batch).flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-1)
        return total, (wanted >= 0).sum().float()


class MeanOverTokens(CountsPadding):
    """A mean with a weight of one: throughput would count batches."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        wanted = torch.where(batch == 0, -1, batch % CLASSES)
        return cross_entropy(model(batch).flatten(0, 1), wanted.flatten(), ignore_index=-1), torch.tensor(1.0)


class CachesSamples(Healthy):
    """Reads a sample slowly, once."""

    def datasets(self) -> tuple[Any, Any]:
        return Samples(functools.cache(self.read)), blobs()

    @staticmethod
    def read(data: Any, index: int) -> Any:
        time.sleep(0.002)
        return data[index]


class MasksOfOneSeed(Healthy):
    """Every rank scales its input by what NumPy's generator says, which each seeds alike."""

    def build_model(self) -> nn.Module:
        np.random.seed(7)
        return self.Net()

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * float(np.random.uniform(0.9, 1.1)) if self.training else x)


class GeneratorInAModule(Healthy):
    """Noise in training, from a generator that every rank seeds alike."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.generators = {"noise": torch.Generator().manual_seed(1)}

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.empty_like(x).normal_(generator=self.generators["noise"]) if self.training else 0.0
            return super().forward(x + 0.1 * noise)


class GeneratorInTheWorkload(Healthy):
    """The same in loss(), of Python's own class."""

    def __init__(self) -> None:
        self.draws = random.Random(1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return super().loss(model, (x * (self.draws.uniform(0.9, 1.1) if model.training else 1.0), y))


class NoiseInAHelper(Healthy):
    """In evaluation too, so that gradients cannot be compared closely; from a generator two levels below the loss."""

    def __init__(self) -> None:
        self.settings = {"noise": [torch.Generator().manual_seed(1)]}

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return super().loss(model, (x + 0.2 * torch.empty_like(x).normal_(generator=self.settings["noise"][0]), y))


class SeedsNumpyInForward(Healthy):
    """Every step scales its input alike."""

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            np.random.seed(3)
            return super().forward(x * float(np.random.uniform(0.9, 1.1)) if self.training else x)


class DrawsFromTheSystem(Healthy):
    """From a generator without a state."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.draws = random.SystemRandom()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.draws.uniform(0.99, 1.01) if self.training else x)


class OneNumpyNoiseForAll(OwnSamples):
    @staticmethod
    def read(data: Any, index: int) -> Any:
        np.random.seed(0)
        x, y = data[index]
        return x + 0.1 * np.random.randn(8).astype(np.float32), y


FAULTS: dict[str, list[tuple[type[Healthy], str]]] = {
    "gradient scaling": [*product((ScaledByWorldSize, NormalisesAdvantages), ("ddp",))],
    "loss weight": [*product((MeanOfWeightOne,), ("single", "dp", "ddp")), (MeanOverTokens, "single")],
    "execution": [(LossAlone, "single"), (NeedsExchange, "ddp")],
    "evaluation": [*product((OtherLabels, LossInTrainMode), ("single", "ddp"))],
    "parameter updates": [
        *product((UpdatesInLoss,), ("single", "dp")),
        *product((UpdatesInAHook,), ("single", "ddp")),
        *product((PlainWeight, GlobalWeight, DrawnConstant), ("single",)),
        (OnlyBiases, "ddp"),
    ],
    "train mode": [*product((EvaluatesInLoss,), ("ddp", "single")), (OneSampleNorm, "single")],
    "state in forward": [
        *product((AddsOnRankOne, SetsOnRankOne, AddsOnRankZero), ("ddp",)),
        *product((CentresItsBatches, RemembersItsBatches), ("ddp", "fsdp")),
    ],
    "memory growth": [(KeepsItsGraphs, "single")],
    "slow rank": [(LogsOnOneRank, "ddp")],
    "threads": [*product((StartsAThread, StartsAProcess, ChangesThreads), ("single",))],
    "data sharding": [
        *product((SamplerInASubset,), ("dp", "single")),
        *product((NoSamples, OneNoiseForAll, OneNumpyNoiseForAll, CachesSamples), ("single",)),
    ],
    "validation set": [
        *product((ValidatesOnTraining, OverlappingSplit, OverlappingSlices), ("single",)),
        *product((CopiedRows, NothingToValidate), ("single",)),
    ],
    "randomness": [
        *product((MasksOfOneSeed, GeneratorInAModule, GeneratorInTheWorkload, NoiseInAHelper), ("ddp",)),
        *((SeedsNumpyInForward, "ddp"), (DrawsFromTheSystem, "single")),
    ],
    "metrics": [
        *product((AreaByBatch, EvaluatesToATensor, EvaluatesToNaN), ("single",)),
        *product((EvaluatesOnTheFirst, EvaluatesToNoneElsewhere), ("ddp",)),
    ],
    "padding": [(CountsPadding, "single")],
}
"""The check that must name the fault -> workloads that have it, and under which strategy."""
