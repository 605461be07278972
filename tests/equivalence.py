"""Trains small models as one rank of a strategy, and tells what came out: for test_equivalence.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Cell
from harness.train.loader import Batches, Share, epoch_shares
from harness.train.ranks import Ranks
from harness.train.training import Training, local_part
from harness.train.workloads.conv_stack import ConvStack
from harness.train.workloads.emulated_compute import EmulatedCompute
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import LanguageModel
from harness.train.workloads.mlp import Mlp
from harness.train.workloads.padded_sequences import PaddedSequences
from harness.train.workloads.segmentation import Segmentation

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
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

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
    "segmentation": lambda: Segmentation(image_size=16),
    "padded_sequences": lambda: PaddedSequences(longest=40, text_bytes=20_000),
    "language_model": lambda: LanguageModel(context=16, text_bytes=20_000),
    "emulated_compute": lambda: EmulatedCompute(mebibytes=0.01, step_ms=0.1),
}


class Faulty(Training):
    """Training with a mistake that the comparison must find."""

    fault = ""

    def _divisor(self, weight: Tensor, share: Share) -> tuple[Tensor | float, Tensor | float]:
        divisor = super()._divisor(weight, share)[0]
        if self.fault == "unweighted last batch":
            divisor = float(max(share.samples, 1)) * self._ranks.world_size  # each rank's own mean, averaged
        if self.fault == "sum for mean":
            divisor = 1.0
        return divisor, self._ranks.world_size / divisor


MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}


def training_of(
    strategy: str,
    rank: int,
    world_size: int,
    devices: int,
    workload: Any,
    kind: type[Training] = Training,
    **change: Any,
) -> Training:
    """A training of this rank. ``change``: of the cell."""
    cell = Cell("w", None, None, strategy, "cpu", devices, 1, "strong", None, BATCH)
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (CPU,) * (devices if strategy == "dp" else 1))
    training: Training = kind(replace(cell, **{"optimizer": MOMENTUM, **change}), workload, SEED, ranks)
    return training


def step_through(training: Training, epochs: Iterable[int], share_rank: int | None = None) -> None:
    """These epochs, the last batch of each uneven. ``share_rank``: whose samples, if they are another rank's."""
    workload: Any = training._workload
    ranks, count = training._ranks, training._cell.micro_batches
    place = (ranks.rank if share_rank is None else share_rank, ranks.world_size)
    shares = list(chain.from_iterable(epoch_shares(SAMPLES, BATCH, SEED, epoch, *place) for epoch in epochs))
    data, collate = Subset(workload.datasets()[0], range(SAMPLES)), getattr(workload, "collate", None)
    source = Batches(data, seed=SEED, ranks=ranks, options={}, collate=collate, micro_batches=count).of(shares)
    for share in shares:
        training.step(islice(source, count) if count > 1 else next(source), share)


def train(strategy: str, rank: int, world_size: int, devices: int, name: str, fault: str, epochs: int) -> list[float]:
    """All parameters after the epochs."""
    optimizer = MOMENTUM if name in ("samples", "tokens") else {**MOMENTUM, "lr": 0.01}
    Faulty.fault = fault
    training = training_of(strategy, rank, world_size, devices, WORKLOADS[name](), Faulty, optimizer=optimizer)
    step_through(training, range(epochs), 0 if fault == "one rank's data repeated" else None)
    return parameters_of(training)


class OnMeta(Regression):
    """The same model, built on the meta device."""

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return super().build_model()

    def init_weights(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=0.1)


def train_otherwise(strategy: str, rank: int, world_size: int, workload: Regression, **change: Any) -> Training:
    training = training_of(strategy, rank, world_size, world_size, workload, **change)
    training.expect_few_steps()  # at a loss scale of 65,536 the first one is skipped
    step_through(training, range(1))
    return training


def parameters_of(training: Training) -> list[float]:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in training.model.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def scales_after_an_overflow(strategy: str, rank: int, world_size: int) -> list[float]:
    """The loss scale on each rank after a step in which one number of one rank's gradients, or shards, is infinite."""
    training = train_otherwise(strategy, rank, world_size, Regression(), precision="fp16")
    update = training._scaled_update

    def overflow() -> None:
        gradient = next(p.grad for p in training.model.parameters() if p.grad is not None)
        if rank == world_size - 1:
            local_part(gradient).view(-1)[0] = torch.inf
        elif strategy != "fsdp":  # ranks of ddp hold the same gradients
            gradient.view(-1)[0] = torch.inf
        update()

    training._scaled_update = overflow  # type: ignore[method-assign]
    share = next(epoch_shares(SAMPLES, BATCH, SEED, 1, rank, world_size))
    ranks = training._ranks
    loader = Batches(Regression().datasets()[0], seed=SEED, ranks=ranks, options={})
    training.step(next(loader.of([share])), share)
    scale = training.loss_scale()
    assert scale
    return training._ranks.gather(scale.scale)


OTHERWISE: dict[str, tuple[type[Regression], dict[str, Any]]] = {
    "fp32": (Regression, {}),
    "bf16": (Regression, {"precision": "bf16"}),
    "fp16": (Regression, {"precision": "fp16"}),
    "meta": (OnMeta, {}),
    "checkpointed": (Regression, {"activation_checkpointing": "full"}),
    "meta checkpointed": (OnMeta, {"activation_checkpointing": "full"}),
}
"""Trainings beside the plain one, by name: workload and change of the cell."""


def trained_otherwise(rank: int, world_size: int) -> dict[tuple[str, int, str, str], Any]:
    """Every strategy with each of OTHERWISE, ddp with each hook, fsdp by autocast, and scales after an overflow."""
    found: dict[tuple[str, int, str, str], Any] = {}
    for strategy in SEVERAL if world_size > 1 else ["single", *SEVERAL]:
        for name, (workload, change) in OTHERWISE.items():
            training = train_otherwise(strategy, rank, world_size, workload(), **change)
            found[strategy, world_size, "otherwise", name] = parameters_of(training)
        if strategy != "single":
            found[strategy, world_size, "otherwise", "scales"] = scales_after_an_overflow(strategy, rank, world_size)
    for hook in ("bf16_compress", "fp16_compress"):
        training = train_otherwise("ddp", rank, world_size, Regression(), strategy_options={"comm_hook": hook})
        found["ddp", world_size, "otherwise", hook] = parameters_of(training)
    options = {"mixed_precision": "autocast"}
    training = train_otherwise("fsdp", rank, world_size, Regression(), precision="bf16", strategy_options=options)
    found["fsdp", world_size, "otherwise", "autocast"] = parameters_of(training)
    return found


def results(rank: int, world_size: int) -> dict[tuple[str, int, str, str], Any]:
    """All parameters under every strategy of this world size, right and with each planted fault."""
    found: dict[tuple[str, int, str, str], Any] = {}
    for strategy in SEVERAL if world_size > 1 else BUILTIN_TRAITS:
        for devices in [1, 2, 3] if strategy == "dp" else [world_size]:
            for name in WORKLOADS:
                found[strategy, devices, name, ""] = train(strategy, rank, world_size, devices, name, "", EPOCHS)
        if world_size > 1:
            for fault in FAULTS:
                faulty = train(strategy, rank, world_size, world_size, "samples", fault, EPOCHS)
                found[strategy, world_size, "samples", fault] = faulty
    if world_size == 1:
        for name in WORKLOADS:
            found["untrained", 1, name, ""] = train("single", rank, world_size, 1, name, "", 0)
    return found
