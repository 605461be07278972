"""What one rank trains for test_equivalence.py, in a process of its own: accumulation, clipping, checkpoints too."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.checkpoint import CheckpointManager
from tests import equivalence
from tests.equivalence import EPOCHS, MOMENTUM, SEVERAL, Regression, parameters_of, step_through, training_of

RECIPES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulation": 3},
    "clipped": {"clip_grad_norm": 0.1},
    "both": {"accumulation": 2, "clip_grad_norm": 0.1},
}
"""Training options by name; without accumulation, what one device does with them is what all must do."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": MOMENTUM,
    # of a small gradient's rounding Adam makes a large step; eps keeps it small
    "AdamW": {"name": "AdamW", "lr": 0.01, "eps": 0.01, "betas": (0.8, 0.95)},
}

KEPT = (("single", 1), ("dp", 2), *((strategy, 2) for strategy in SEVERAL))
"""Strategies and devices whose checkpoints are kept; these go on from all that are there, and those of three ranks."""


def train(strategy: str, rank: int, world_size: int, devices: int, unit: str, recipe: str) -> list[float]:
    training = training_of(strategy, rank, world_size, devices, Regression(unit), training=RECIPES[recipe])
    step_through(training, range(EPOCHS))
    return parameters_of(training)


def exchanges(strategy: str, rank: int, world_size: int, recipe: str) -> float:
    """How often gradients were reduced over the ranks in one epoch."""
    training = training_of(strategy, rank, world_size, world_size, Regression(), training=RECIPES.get(recipe, {}))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step_through(training, range(1))
    return float(sum(event.name == "gloo:all_reduce" for event in profiler.events()))


def keep(folder: Path, strategy: str, rank: int, world_size: int, devices: int, optimizer: str) -> None:
    """A checkpoint after the first of the two epochs."""
    training = training_of(strategy, rank, world_size, devices, Regression(), optimizer=OPTIMIZERS[optimizer])
    step_through(training, range(1))
    CheckpointManager(folder / f"{strategy}{devices}-{optimizer}", 1, training, training._ranks).save(1, {}, last=False)


def go_on(folder: Path, source: str, strategy: str, rank: int, world_size: int, devices: int) -> list[float]:
    """All parameters after the second epoch, begun from what another strategy kept."""
    optimizer = OPTIMIZERS[source.partition("-")[2]]
    training = training_of(strategy, rank, world_size, devices, Regression(), optimizer=optimizer)
    assert CheckpointManager(folder / source, 1, training, training._ranks).resume()
    step_through(training, range(1, EPOCHS))
    return parameters_of(training)


def results(rank: int, world_size: int, checkpoints: Path) -> dict[tuple[str, int, str, str], Any]:
    """Every strategy of this world size with each recipe, and going on from each checkpoint that is there."""
    found: dict[tuple[str, int, str, str], Any] = {}
    strategies = SEVERAL if world_size > 1 else [*BUILTIN_TRAITS]
    placed = [(s, devices) for s in strategies for devices in ([1, 2, 3] if s == "dp" else [world_size])]
    for strategy, devices in placed:
        for unit, recipe in product(("samples", "tokens"), RECIPES):
            found[strategy, devices, unit, recipe] = train(strategy, rank, world_size, devices, unit, recipe)
        for optimizer in OPTIMIZERS if (strategy, devices) in KEPT else ():
            keep(checkpoints, strategy, rank, world_size, devices, optimizer)
    if world_size == 1:
        adam = training_of("single", rank, world_size, 1, Regression(), optimizer=OPTIMIZERS["AdamW"])
        step_through(adam, range(EPOCHS))
        found["single", 1, "samples", "AdamW"] = parameters_of(adam)
    for strategy in strategies if world_size > 1 else []:
        counts = [exchanges(strategy, rank, world_size, recipe) for recipe in ("", "accumulated")]
        found[strategy, world_size, "samples", "exchanges"] = counts
    for strategy, devices in (each for each in placed if each in KEPT or world_size == 3):
        for source in sorted(path.name for path in checkpoints.iterdir()):
            went_on = go_on(checkpoints, source, strategy, rank, world_size, devices)
            found[strategy, devices, "samples", f"from {source}"] = went_on
    return found


def main(rank: int, world_size: int, out: Path) -> None:
    """All trainings: starting a process costs more than they do."""
    found = equivalence.results(rank, world_size) | equivalence.trained_otherwise(rank, world_size)
    found |= results(rank, world_size, out.parent / "checkpoints")
    if rank == 0:
        torch.save(found, out)
