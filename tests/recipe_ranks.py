"""Accumulation, clipping and checkpoints as one rank of a strategy: for test_recipe_equivalence.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Cell
from harness.train.checkpoint import CheckpointManager
from harness.train.loader import batches, epoch_shares
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.equivalence import BATCH, CPU, EPOCHS, SAMPLES, SEED, SEVERAL, Regression, parameters_of

RECIPES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulation": 3},
    "clipped": {"clip_grad_norm": 0.1},
    "both": {"accumulation": 2, "clip_grad_norm": 0.1},
}
"""Training options by name; without accumulation, what one device does with them is what all must do."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    # of a small gradient's rounding Adam makes a large step; eps keeps it small
    "AdamW": {"name": "AdamW", "lr": 0.01, "eps": 0.01, "betas": (0.8, 0.95)},
}


def training_of(
    strategy: str, rank: int, world_size: int, devices: int, unit: str, options: dict[str, Any], optimizer: str = "SGD"
) -> tuple[Training, Ranks]:
    cell = Cell("w", None, None, strategy, "cpu", devices, 1, "strong", None, BATCH)
    cell = replace(cell, optimizer=OPTIMIZERS[optimizer], training=options)
    per_worker = devices if strategy == "dp" else 1
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", tuple(CPU for _ in range(per_worker)))
    return Training(cell, Regression(unit), SEED, ranks), ranks


def step_through(training: Training, ranks: Ranks, epochs: Iterable[int]) -> None:
    """These epochs, the last batch of each uneven."""
    place = (ranks.rank, ranks.world_size)
    shares = list(chain.from_iterable(epoch_shares(SAMPLES, BATCH, SEED, epoch, *place) for epoch in epochs))
    count = training._cell.micro_batches
    source = batches(Regression().datasets()[0], shares, seed=SEED, ranks=ranks, options={}, micro_batches=count)
    for share in shares:
        training.step(islice(source, count) if count > 1 else next(source), share)


def train(strategy: str, rank: int, world_size: int, devices: int, unit: str, recipe: str) -> list[float]:
    """All parameters after two epochs."""
    training, ranks = training_of(strategy, rank, world_size, devices, unit, RECIPES.get(recipe, {}))
    step_through(training, ranks, range(EPOCHS))
    return parameters_of(training)


def exchanges(strategy: str, rank: int, world_size: int, recipe: str) -> float:
    """How often gradients were reduced over the ranks in one epoch."""
    training, ranks = training_of(strategy, rank, world_size, world_size, "samples", RECIPES.get(recipe, {}))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step_through(training, ranks, range(1))
    return float(sum(event.name == "gloo:all_reduce" for event in profiler.events()))


def keep(folder: Path, strategy: str, rank: int, world_size: int, devices: int, optimizer: str) -> None:
    """A checkpoint after the first of the two epochs."""
    training, ranks = training_of(strategy, rank, world_size, devices, "samples", {}, optimizer)
    step_through(training, ranks, range(1))
    CheckpointManager(folder / f"{strategy}{devices}-{optimizer}", 1, training, ranks).save(1, {}, last=False)


def go_on(folder: Path, source: str, strategy: str, rank: int, world_size: int, devices: int) -> list[float]:
    """All parameters after the second epoch, begun from what another strategy kept."""
    optimizer = source.partition("-")[2]
    training, ranks = training_of(strategy, rank, world_size, devices, "samples", {}, optimizer)
    assert CheckpointManager(folder / source, 1, training, ranks).resume()
    step_through(training, ranks, range(1, EPOCHS))
    return parameters_of(training)


def results(rank: int, world_size: int, checkpoints: Path) -> dict[tuple[str, int, str, str], Any]:
    """Every strategy of this world size with each recipe, and going on from each checkpoint that is there."""
    found: dict[tuple[str, int, str, str], Any] = {}
    strategies = SEVERAL if world_size > 1 else [*BUILTIN_TRAITS]
    placed = [(s, devices) for s in strategies for devices in ([1, 2, 3] if s == "dp" else [world_size])]
    for strategy, devices in placed:
        for unit, recipe in product(("samples", "tokens"), RECIPES):
            found[strategy, devices, unit, recipe] = train(strategy, rank, world_size, devices, unit, recipe)
        for optimizer in OPTIMIZERS:
            keep(checkpoints, strategy, rank, world_size, devices, optimizer)
    if world_size == 1:
        adam, ranks = training_of("single", rank, world_size, 1, "samples", {}, "AdamW")
        step_through(adam, ranks, range(EPOCHS))
        found["single", 1, "samples", "AdamW"] = parameters_of(adam)
    for strategy in strategies if world_size > 1 else []:
        counts = [exchanges(strategy, rank, world_size, recipe) for recipe in ("", "accumulated")]
        found[strategy, world_size, "samples", "exchanges"] = counts
    for strategy, devices in placed:
        for source in sorted(path.name for path in checkpoints.iterdir()):
            went_on = go_on(checkpoints, source, strategy, rank, world_size, devices)
            found[strategy, devices, "samples", f"from {source}"] = went_on
    return found
