"""Kinds of training with state or parts of their own, healthy, and the same with state that ranks do not share."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize, one_hot, softplus, triplet_margin_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from tests.doctor.healthy import CLASSES, WIDTH, Healthy, Net

CODES, KEYS = 6, 256
"""Vectors of a codebook, and of a queue."""


def summed(value: Tensor) -> Tensor:
    """The sum over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks."""
    if not dist.is_initialized():
        return rows
    parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def weighted(loss: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.tensor(float(len(x)))


class Experts(Healthy):
    """A mixture of experts, each of which gets the samples that a router chooses for it, in some batches none."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4)
            layers = [(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(4)]
            self.experts = nn.ModuleList(nn.Sequential(one, nn.ReLU(), other) for one, other in layers)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            share, chosen = self.router(hidden).softmax(dim=1).max(dim=1)
            mixed = self.middle(hidden)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                mixed = mixed.index_add(0, rows, expert(hidden[rows]) * share[rows, None])
            return self.last(self.drop(mixed))


class Adversaries(Healthy):
    """A GAN in one model and one loss: the generator's gradient passes the discriminator, which it does not train."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
            self.discriminator = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            made = self.generator(torch.randn_like(x))
            fixed = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
            fooled = functional_call(self.discriminator, fixed, (made,))
            return self.discriminator(x), self.discriminator(made.detach()), fooled

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, _ = batch
        real, made, fooled = model(x)
        return weighted((softplus(-real) + softplus(made) + softplus(-fooled)).sum(), x)


class Codebook(Healthy):
    """Codes that are averages of all ranks' vectors, in buffers or in parameters that are frozen."""

    class Net(Net):
        frozen = False

        def __init__(self) -> None:
            super().__init__()
            codes = torch.randn(CODES, 16)
            for name, value in {"codes": codes, "sizes": torch.ones(CODES), "sums": codes.clone()}.items():
                if self.frozen:
                    self.register_parameter(name, nn.Parameter(value, requires_grad=False))
                else:
                    self.register_buffer(name, value)

        def exchanged(self, value: Tensor) -> Tensor:
            return summed(value)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.first(x))
            hidden = hidden + self.middle(hidden)
            chosen = torch.cdist(hidden, self.codes).argmin(dim=1)
            code = self.codes[chosen]
            if self.training:
                with torch.no_grad():
                    which = one_hot(chosen, CODES).to(hidden.dtype)
                    self.sizes.mul_(0.9).add_(0.1 * self.exchanged(which.sum(dim=0)))
                    self.sums.mul_(0.9).add_(0.1 * self.exchanged(which.T @ hidden))
                    self.codes.copy_(self.sums / self.sizes[:, None].clamp(min=0.01))
            return self.last(hidden + (code - hidden).detach()), (hidden - code).square().mean(dim=1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        scores, apart = model(x)
        return weighted(cross_entropy(scores, y, reduction="sum") + 0.25 * apart.sum(), x)


class FrozenCodebook(Codebook):
    class Net(Codebook.Net):
        frozen = True


class CodebookOfEachRank(Codebook):
    class Net(Codebook.Net):
        def exchanged(self, value: Tensor) -> Tensor:
            return value


class FrozenCodebookOfEachRank(Codebook):
    class Net(CodebookOfEachRank.Net):
        frozen = True


class Momentum(Healthy):
    """MoCo: a frozen encoder that follows the trained one, and a queue of its keys of all ranks."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, CLASSES))
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", normalize(torch.randn(KEYS, CLASSES), dim=1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def exchanged(self, keys: Tensor) -> Tensor:
            return gathered(keys)

        @torch.no_grad()
        def keys(self, x: Tensor) -> Tensor:
            if self.training:
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    key.data = 0.99 * key.data + 0.01 * query.data
            return normalize(self.key(x + 0.1), dim=1)

        @torch.no_grad()
        def keep(self, keys: Tensor) -> None:
            kept = self.exchanged(keys)
            self.queue[(self.place + torch.arange(len(kept), device=keys.device)) % KEYS] = kept
            self.place.copy_((self.place + len(kept)) % KEYS)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            keys, query = self.keys(x), normalize(self.query(x), dim=1)
            scores = torch.cat([(query * keys).sum(dim=1, keepdim=True), query @ self.queue.T.clone()], dim=1)
            if self.training:
                self.keep(keys)
            return super().forward(x), scores

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        classes, scores = model(x)
        first = torch.zeros(len(x), dtype=torch.long, device=x.device)
        total = cross_entropy(classes, y, reduction="sum") + cross_entropy(scores, first, reduction="sum")
        return weighted(total, x)


class QueueOfEachRank(Momentum):
    class Net(Momentum.Net):
        def exchanged(self, keys: Tensor) -> Tensor:
            return keys


class Checkpointed(Healthy):
    """Gradient checkpointing by the workload itself, of a part with dropout."""

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            return self.last(
                hidden + checkpoint(lambda part: self.drop(self.middle(part)), hidden, use_reentrant=False)
            )


class Triplets(Healthy):
    """An anchor with a sample of its kind and one of another in each sample."""

    def collate(self, samples: list[Any]) -> Any:
        x, _ = default_collate(samples)
        return x, x + 0.1, x.flip(dims=(1,))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        anchor, same, other = model(torch.cat(batch)).chunk(3)
        return weighted(triplet_margin_loss(anchor, same, other, margin=5.0, reduction="sum"), anchor)


class Mean:
    """A mean of what it has seen."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, x: Tensor) -> None:
        self.value = 0.9 * self.value + 0.1 * float(x.detach().mean())


class MeanInAHelper(Healthy):
    """A mean of each rank's own batches, in a plain object that a module holds."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen = [Mean()]

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen[0].add(x)
            return super().forward(x - self.seen[0].value)


class MeanInTheWorkload(Healthy):
    def __init__(self) -> None:
        self.seen = Mean()

    def shared(self, x: Tensor) -> Tensor:
        return x

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        if model.training:
            self.seen.add(self.shared(x))
        return super().loss(model, (x - self.seen.value, y))


class MeanOfAllRanks(MeanInTheWorkload):
    def shared(self, x: Tensor) -> Tensor:
        return summed(x.mean()) / (dist.get_world_size() if dist.is_initialized() else 1)


class MeanInAFrozenParameter(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.data.lerp_(x.mean(dim=0), 0.1)
            return super().forward(x - self.mean)


class LogsWithOwnNoise(Healthy):
    """What it logs differs between ranks, and so does the loss of the same batch, by the noise of each rank."""

    def __init__(self) -> None:
        self.noise, self.last = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0), 0.0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        noise = 0.1 * torch.empty(x.shape).normal_(generator=self.noise) if model.training else torch.zeros(x.shape)
        total, weight = super().loss(model, (x + noise.to(x.device), y))
        self.last = float(total.detach())
        return total, weight


FAULTS: dict[str, list[tuple[type[Healthy], str]]] = {
    "state in forward": [
        *product((CodebookOfEachRank, FrozenCodebookOfEachRank, QueueOfEachRank), ("ddp",)),
        *product((MeanInAHelper, MeanInTheWorkload, MeanInAFrozenParameter), ("ddp",)),
    ]
}
"""The check that must name the fault -> workloads that have it, and under which strategy."""
HEALTHY: list[tuple[type[Healthy], str]] = [
    *product((Experts, Codebook, Checkpointed, Triplets), ("single", "ddp", "fsdp")),
    *product((Adversaries,), ("single", "ddp")),
    *product((FrozenCodebook, Momentum, MeanOfAllRanks, LogsWithOwnNoise), ("ddp",)),
]
