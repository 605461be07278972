"""Trains small models as one rank of a strategy, and tells what came out: for test_equivalence.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Cell
from harness.train.loader import Share, batches, epoch_shares
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads.conv_stack import ConvStack
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import LanguageModel
from harness.train.workloads.mlp import Mlp
from harness.train.workloads.padded_sequences import PaddedSequences

SAMPLES, BATCH, EPOCHS, SEED = 22, 7, 2, 4  # uneven shares; one sample is left for the last batch
CPU = torch.device("cpu")
SEVERAL = [name for name, traits in BUILTIN_TRAITS.items() if not traits.one_process]
"""The strategies with a process a device."""
FAULTS = ("unweighted last batch", "sum for mean", "one rank's data repeated")


class Regression:
    """A model without dropout and batch statistics, whose samples weigh alike (samples) or not (tokens)."""

    def __init__(self, unit: str = "samples") -> None:
        self.unit = unit

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
        return nn.Sequential(*layers)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 5, generator=generator)
        y = torch.sin(x.sum(dim=1, keepdim=True))
        tokens = torch.randint(1, 9, (SAMPLES,), generator=generator).float()
        data = TensorDataset(x, y, tokens)
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, tokens = batch
        errors = (model(x) - y).square().squeeze(1)
        if self.unit == "tokens":
            return (errors * tokens).sum(), tokens.sum()
        return errors.sum(), torch.tensor(float(len(x)))


WORKLOADS: Mapping[str, Callable[[], Any]] = {
    "samples": lambda: Regression("samples"),
    "tokens": lambda: Regression("tokens"),
    "image_classification": lambda: ImageClassification(model="resnet8", width=4, norm="group"),
    "conv_stack": lambda: ConvStack(image_size=8),
    "mlp": lambda: Mlp(model="small"),
    "padded_sequences": lambda: PaddedSequences(longest=40, text_bytes=20_000),
    "language_model": lambda: LanguageModel(context=16, text_bytes=20_000),
}


class Faulty(Training):
    """Training with a mistake that the comparison must find."""

    fault = ""

    def _global_weight(self, weight: Tensor, share: Share) -> Tensor | float:
        if self.fault == "unweighted last batch":
            return float(max(share.samples, 1)) * self._ranks.world_size  # each rank's own mean, averaged
        if self.fault == "sum for mean":
            return 1.0
        return super()._global_weight(weight, share)


def train(strategy: str, rank: int, world_size: int, devices: int, name: str, fault: str, epochs: int) -> list[float]:
    """All parameters after the epochs, the last batch of each uneven."""
    base = Cell("w", None, None, strategy, "cpu", devices, 1, "strong", None, BATCH)
    cell = replace(
        base, optimizer={"name": "SGD", "lr": 0.05 if name in ("samples", "tokens") else 0.01, "momentum": 0.9}
    )
    per_worker = devices if strategy == "dp" else 1
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", tuple(CPU for _ in range(per_worker)))
    workload = WORKLOADS[name]()
    Faulty.fault = fault
    training = Faulty(cell, workload, SEED, ranks)
    share_rank = 0 if fault == "one rank's data repeated" else rank
    shares = list(
        chain.from_iterable(epoch_shares(SAMPLES, BATCH, SEED, e, share_rank, world_size) for e in range(epochs))
    )
    data, collate = Subset(workload.datasets()[0], range(SAMPLES)), getattr(workload, "collate", None)
    stream = batches(data, shares, seed=SEED, ranks=ranks, options={}, collate=collate)
    for share, batch in zip(shares, stream, strict=True):
        training.step(batch, share)
    flat: list[float] = []
    for parameter in training.model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        flat += whole.detach().flatten().double().tolist()
    return flat


def results(rank: int, world_size: int) -> dict[tuple[str, int, str, str], Any]:
    """All parameters under every strategy of this world size, right and with each planted fault."""
    found: dict[tuple[str, int, str, str], Any] = {}
    for strategy in SEVERAL if world_size > 1 else BUILTIN_TRAITS:
        for devices in [1, 2, 3] if strategy == "dp" else [world_size]:
            for name in WORKLOADS:
                found[strategy, devices, name, ""] = train(strategy, rank, world_size, devices, name, "", EPOCHS)
        if world_size > 1:
            for fault in FAULTS:
                found[strategy, world_size, "samples", fault] = train(
                    strategy, rank, world_size, world_size, "samples", fault, EPOCHS
                )
    if world_size == 1:
        for name in WORKLOADS:
            found["untrained", 1, name, ""] = train("single", rank, world_size, 1, name, "", 0)
    return found
