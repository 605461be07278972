"""Workloads with one fault each, as users write them; ``Healthy`` is the same without a fault."""

from __future__ import annotations

import copy
import itertools
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import Dataset, DistributedSampler

from tests.doctor import faulty_steps, kinds, lookalikes, recipes
from tests.doctor.healthy import CLASSES, WIDTH, Graph, Healthy, Net, OwnSamples, blobs, sequences


class BiasBeforeNorm(Healthy):
    """Healthy: what a bias adds the norm after it takes away, so that its gradient is nothing but rounding."""

    def build_model(self) -> nn.Module:
        first, last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)
        return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), last)


class HandUpdated(Healthy):
    """Healthy: one parameter is no optimizer's business and is moved by hand, alike on every rank."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature.detach() + 0.0 * self.temperature

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inner = getattr(model, "module", model)
        if inner.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.move(inner.temperature, batch)
        return super().loss(model, batch)

    def move(self, temperature: Tensor, batch: Any) -> None:
        temperature.mul_(1.01)


class MaskNotRegistered(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x)) * self.mask
            return self.last(hidden + self.middle(hidden))


class NoiseOnTheHost(Healthy):
    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(self.middle(hidden + 0.1 * torch.randn(hidden.shape)))


class CudaByName(Healthy):
    def build_model(self) -> nn.Module:
        return Net().cuda()


class BatchesOfItsOwn(Healthy):
    def collate(self, samples: list[Any]) -> Graph:
        return Graph(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return super().loss(model, (batch.x, batch.y))


class KeepsItsOwnModel(Healthy):
    def build_model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return super().loss(self.net, batch)


class WrapsItself(Healthy):
    def build_model(self) -> nn.Module:
        return nn.DataParallel(Net())


class UnusedHead(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(16, 1)


class DetachedFeatures(Healthy):
    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            features = torch.relu(self.first(x))
            return self.last((features + self.middle(features)).detach())


class TrainsACopy(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "copy"):
            self.copy = copy.deepcopy(getattr(model, "module", model))
        return super().loss(self.copy, batch)


class UpdatesItsReplica(Healthy):
    """A centre that forward moves by hand, as in k-means or EMA codebooks."""

    class Net(Net):
        trained = False

        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(8), requires_grad=self.trained)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.centre.data = 0.9 * self.centre.data + 0.1 * x.mean(dim=0).detach()
            return super().forward(x - self.centre.detach())


class TrainsItsReplica(UpdatesItsReplica):
    """The same with a centre that counts as trained: no optimizer reaches it, since forward assigns it."""

    class Net(UpdatesItsReplica.Net):
        trained = True


class UpdatesByRank(HandUpdated):
    """An update by hand from each rank's own batch."""

    def move(self, temperature: Tensor, batch: Any) -> None:
        temperature.add_(0.001 * batch[0].mean())


class CountsItsSteps(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x)


class RunningMean(Healthy):
    class Net(faulty_steps.CentresItsBatches.Net):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
            return Net.forward(self, x)


class Sampled(Dataset[Any]):
    """Somebody's own idea of a distributed data set."""

    def __init__(self, data: Any, replicas: int = 4) -> None:
        self.data = data
        self.sampler = DistributedSampler(data, num_replicas=replicas, rank=0)
        self.indices = list(self.sampler)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]


class SamplerInside(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        return Sampled(blobs()), blobs()


class ShardsByRank(Healthy):
    def datasets(self) -> tuple[Any, Any]:
        data = blobs()
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return torch.utils.data.Subset(data, list(range(rank, len(data), world))), data


class AnySample(OwnSamples):
    """Draws which sample it gives, from a generator that no seed reaches."""

    @staticmethod
    def read(data: Any, index: int) -> Any:
        return data[random.SystemRandom().randrange(len(data))]


class AlwaysTheFirst(OwnSamples):
    @staticmethod
    def read(data: Any, index: int) -> Any:
        return blobs(16)[0]


class MeanForSum(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return cross_entropy(model(x), y), torch.tensor(float(len(y)))


class MeanOverReplicas(Healthy):
    """The loss inside forward, as it is advised to keep outputs off the first device; then a mean over devices."""

    class Net(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return cross_entropy(super().forward(x), y, reduction="sum").unsqueeze(0)

    total = staticmethod(torch.mean)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return self.total(model(x, y)), torch.tensor(float(len(y)))


class SumOverReplicas(MeanOverReplicas):
    """Healthy: the same with a sum."""

    total = staticmethod(torch.sum)


class NormalisedOverTheBatch(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = model(x)
        logits = (logits - logits.mean(dim=0)) / (logits.std(dim=0) + 1e-3)
        return cross_entropy(logits, y, reduction="sum"), torch.tensor(float(len(y)))


class Sequences(Healthy):
    """Sequences of different lengths, padded for the whole batch."""

    padding = -1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.last = nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
            padded = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=self.most(tokens))
            return self.last(padded[0])

        def most(self, tokens: Tensor) -> int | None:
            return tokens.size(1)

    def datasets(self) -> tuple[Any, Any]:
        data = sequences()
        return data, data

    def collate(self, samples: list[Tensor]) -> Any:
        lengths = torch.tensor([len(sample) for sample in samples])
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), lengths

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, lengths = batch
        scores = model(tokens, lengths)
        kept = tokens[:, : scores.size(1)]
        wanted = torch.where(kept == 0, self.padding, kept % CLASSES)
        total = cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=-1)
        return total, torch.tensor(float(len(tokens)))


class PaddingCounts(Sequences):
    """The padding is in the loss: how much there is depends on which samples meet."""

    padding = 0


class NoTotalLength(Sequences):
    class Net(Sequences.Net):
        def most(self, tokens: Tensor) -> int | None:
            return None


class HiddenStateFirst(Sequences):
    """Returns the last hidden state too, whose first dimension is the layers."""

    class Net(Sequences.Net):
        def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
            _, last = self.rnn(self.embed(tokens))
            return super().forward(tokens, lengths), last

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return super().loss(lambda tokens, lengths: model(tokens, lengths)[0], batch)  # type: ignore[arg-type]


class SlowSamples(OwnSamples):
    @staticmethod
    def read(data: Any, index: int) -> Any:
        time.sleep(0.002)
        return data[index]


class KeepsTooMuch(Healthy):
    """Every sample is blown up on its way: to 8 MiB."""

    batch = 2**20

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.first(x)[:, :, None].expand(-1, -1, 128 * 1024).contiguous()
            hidden = torch.tanh(wide).mean(dim=2)
            return self.last(hidden + self.middle(hidden))


class SetsThreads(Healthy):
    def build_model(self) -> nn.Module:
        torch.set_num_threads(4 * (os.cpu_count() or 1))
        return Net()


class SeedsInForward(Healthy):
    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(42)
            return super().forward(x)


class SeedsFromTheProcess(Healthy):
    def build_model(self) -> nn.Module:
        torch.manual_seed(os.getpid())
        return Net()


class OneSlowRank(Healthy):
    """Rank 1 shares its core with somebody: its matrix products take longer."""

    def build_model(self) -> nn.Module:
        if dist.is_initialized() and dist.get_rank() == 1 and not getattr(torch, "_slowed", False):
            linear = nn.functional.linear

            def slow(*args: Any) -> Tensor:
                time.sleep(0.02)
                return linear(*args)

            nn.functional.linear = slow  # type: ignore[assignment]
            torch._slowed = True  # type: ignore[attr-defined]
        return Net()


class Explodes(Healthy):
    """Its outputs are a thousand times too large for the learning rate."""

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            return 1000.0 * super().forward(x)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return (model(x) - y[:, None]).square().sum(), torch.tensor(float(len(y)))


class Raises(Healthy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("labels are missing")


class NeedsMany(Healthy):
    """Compares the samples of a batch with each other: a few are no use to it."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if len(batch[0]) < 8:
            raise ValueError("too few samples to compare")
        return super().loss(model, batch)


PLANTED: dict[str, list[tuple[type[Healthy], str]]] = {
    "slow rank": [(OneSlowRank, "ddp")],
    "device placement": [(MaskNotRegistered, "ddp"), (NoiseOnTheHost, "ddp"), (CudaByName, "single")],
    "batch transfer": [(BatchesOfItsOwn, "ddp")],
    "wrapper use": [(KeepsItsOwnModel, "ddp"), (KeepsItsOwnModel, "dp"), (WrapsItself, "ddp")],
    "parameter updates": [
        *((kind, "ddp") for kind in (UnusedHead, DetachedFeatures, TrainsACopy, UpdatesByRank)),
        *((UnusedHead, "single"), (TrainsItsReplica, "dp")),
    ],
    "state in forward": [(CountsItsSteps, "dp"), (RunningMean, "dp"), (UpdatesItsReplica, "dp")],
    "data sharding": [*((SamplerInside, "dp"), (ShardsByRank, "ddp"), (AnySample, "ddp")), (AlwaysTheFirst, "single")],
    "gradient scaling": [
        *itertools.product((MeanForSum, NormalisedOverTheBatch, PaddingCounts), ("ddp",)),
        *((MeanForSum, "fsdp"), (MeanOverReplicas, "dp")),
    ],
    "output shapes": [(NoTotalLength, "dp"), (HiddenStateFirst, "dp")],
    "loader throughput": [(SlowSamples, "ddp")],
    "memory": [(KeepsTooMuch, "ddp")],
    "threads": [(SetsThreads, "single")],
    "randomness": [(SeedsInForward, "ddp"), (SeedsFromTheProcess, "fsdp")],
    "divergence": [(Explodes, "ddp"), (Explodes, "single")],
    "execution": [(Raises, "ddp")],
}
TABLES = (PLANTED, faulty_steps.FAULTS, kinds.FAULTS)
FAULTS = {check: [pair for table in TABLES for pair in table.get(check, [])] for check in PLANTED | faulty_steps.FAULTS}
"""The check that must name the fault -> workloads that have it, and under which strategy."""
HEALTHY: list[tuple[type[Healthy], str]] = [
    *itertools.product((Healthy, HandUpdated, Sequences), ("single", "dp", "ddp", "fsdp")),
    *itertools.product((BiasBeforeNorm,), ("single", "ddp")),
    (SumOverReplicas, "dp"),
    (CountsItsSteps, "ddp"),
    *lookalikes.HEALTHY,
    *recipes.HEALTHY,
    *kinds.HEALTHY,
]
