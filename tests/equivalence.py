"""Trains a small model as one rank of a strategy, in a process of its own, and tells what came out.

Used by test_equivalence.py: ``python -m tests.equivalence RANK WORLD_SIZE STORE OUT``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset

from harness.cell import Cell
from harness.checkpoint import Keeper
from harness.loader import Share, batches, epoch_shares
from harness.ranks import Ranks
from harness.training import Training

SAMPLES, BATCH, EPOCHS, SEED = 22, 7, 2, 4  # uneven shares; one sample is left for the last batch
CPU = torch.device("cpu")
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


class Faulty(Training):
    """Training with a mistake that the comparison must find."""

    fault = ""

    def _global_weight(self, weight: Tensor, share: Share) -> Tensor | float:
        if self.fault == "unweighted last batch":
            return float(max(share.samples, 1)) * self._ranks.world_size  # each rank's own mean, averaged
        if self.fault == "sum for mean":
            return 1.0
        return super()._global_weight(weight, share)


RECIPES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulation": 3},
    "clipped": {"clip_grad_norm": 0.1},
    "both": {"accumulation": 2, "clip_grad_norm": 0.1},
}
"""Training options by name; without accumulation, what one device does with them is what all must do."""


def training_of(
    strategy: str, rank: int, world_size: int, devices: int, unit: str, options: dict[str, Any]
) -> tuple[Faulty, Ranks]:
    cell = Cell("w", None, None, strategy, "cpu", devices, 1, "strong", None, BATCH)
    cell = replace(cell, optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9}, training=options)
    per_worker = devices if strategy == "dp" else 1
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", tuple(CPU for _ in range(per_worker)))
    return Faulty(cell, Regression(unit), SEED, ranks), ranks


def step_through(training: Training, ranks: Ranks, epochs: Iterable[int], share_rank: int | None = None) -> None:
    """These epochs, the last batch of each uneven."""
    rank = ranks.rank if share_rank is None else share_rank
    shares = list(chain.from_iterable(epoch_shares(SAMPLES, BATCH, SEED, e, rank, ranks.world_size) for e in epochs))
    count = training._cell.micro_batches
    source = batches(Regression().datasets()[0], shares, seed=SEED, device=CPU, options={}, micro_batches=count)
    for share, batch in zip(shares, source, strict=True):
        training.step(batch, share)


def parameters_of(training: Training) -> list[float]:
    flat: list[float] = []
    for parameter in training.model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        flat += whole.detach().flatten().double().tolist()
    return flat


def train(
    strategy: str, rank: int, world_size: int, devices: int, unit: str, fault: str = "", recipe: str = ""
) -> list[float]:
    """All parameters after two epochs."""
    Faulty.fault = fault
    training, ranks = training_of(strategy, rank, world_size, devices, unit, RECIPES.get(recipe, {}))
    step_through(training, ranks, range(EPOCHS), 0 if fault == "one rank's data repeated" else None)
    return parameters_of(training)


def exchanges(strategy: str, rank: int, world_size: int, recipe: str) -> float:
    """How often gradients were reduced over the ranks in one epoch."""
    Faulty.fault = ""
    training, ranks = training_of(strategy, rank, world_size, world_size, "samples", RECIPES.get(recipe, {}))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step_through(training, ranks, range(1))
    return float(sum(event.name == "gloo:all_reduce" for event in profiler.events()))


def keep(folder: Path, strategy: str, rank: int, world_size: int, devices: int) -> None:
    """A checkpoint after the first of the two epochs."""
    Faulty.fault = ""
    training, ranks = training_of(strategy, rank, world_size, devices, "samples", {})
    step_through(training, ranks, range(1))
    Keeper(folder / f"{strategy}{devices}", 1, training, ranks).save(1, {}, last=False)


def go_on(folder: Path, source: str, strategy: str, rank: int, world_size: int, devices: int) -> list[float]:
    """All parameters after the second epoch, begun from what another strategy kept."""
    training, ranks = training_of(strategy, rank, world_size, devices, "samples", {})
    assert Keeper(folder / source, 1, training, ranks).resume()
    step_through(training, ranks, range(1, EPOCHS))
    return parameters_of(training)


def main(rank: int, world_size: int, store: str, out: str) -> None:
    """Every strategy of this world size, right, with each recipe and with each planted fault; checkpoints across."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results: dict[tuple[str, int, str, str], list[float]] = {}
    strategies = ["ddp", "fsdp"] if world_size > 1 else ["single", "dp", "ddp", "fsdp"]
    checkpoints = Path(out).parent / "checkpoints"
    placed = [(s, devices) for s in strategies for devices in ([1, 2, 3] if s == "dp" else [world_size])]
    for strategy, devices in placed:
        for unit in ("samples", "tokens"):
            for recipe in ("", *RECIPES):
                results[strategy, devices, unit, recipe] = train(strategy, rank, world_size, devices, unit, "", recipe)
        keep(checkpoints, strategy, rank, world_size, devices)
    for strategy in strategies if world_size > 1 else []:
        for fault in FAULTS:
            results[strategy, world_size, "samples", fault] = train(
                strategy, rank, world_size, world_size, "samples", fault
            )
        counts = [exchanges(strategy, rank, world_size, recipe) for recipe in ("", "accumulated")]
        results[strategy, world_size, "samples", "exchanges"] = counts
    for strategy, devices in placed:
        for source in sorted(path.name for path in checkpoints.iterdir()):
            found = go_on(checkpoints, source, strategy, rank, world_size, devices)
            results[strategy, devices, "samples", f"from {source}"] = found
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    # a thread of torch's may still be there when the interpreter is torn down, and aborts one exit in forty
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
