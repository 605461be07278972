"""Accumulation and clipping train as one device does; a checkpoint of any strategy goes on under any."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence import SEVERAL
from tests.recipe_ranks import OPTIMIZERS, RECIPES

pytestmark = pytest.mark.slow

BOUND = 1e-5
Results = dict[tuple[str, int, str, str], list[float]]


PLACED = [(strategy, devices) for strategy in ("dp", *SEVERAL) for devices in (1, 2, 3)]


def difference(
    trained: Results, strategy: str, devices: int, unit: str, what: str = "", *, of_single: str = ""
) -> float:
    """Relative difference from one device, norm over norm."""
    mine = torch.tensor(trained[strategy, devices, unit, what])
    alone = torch.tensor(trained["single", 1, unit, of_single])
    return float((mine - alone).norm() / alone.norm())


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), *PLACED])
def test_every_strategy_accumulates_and_clips_as_one_device_does(
    trained: Results, strategy: str, devices: int, recipe: str, unit: str
) -> None:
    plain = "" if recipe == "accumulated" else "clipped"
    assert difference(trained, strategy, devices, unit, recipe, of_single=plain) <= BOUND


def test_clipping_changed_the_training(trained: Results) -> None:
    assert difference(trained, "single", 1, "samples", "clipped") > 1e-3


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_gradients_are_reduced_once_a_step_with_any_accumulation(
    trained: Results, strategy: str, world_size: int
) -> None:
    plain, accumulated = trained[strategy, world_size, "samples", "exchanges"]
    assert plain == accumulated >= 4


def test_a_checkpoint_of_any_strategy_goes_on_under_any(trained: Results) -> None:
    across = [(key[0], key[1], key[3]) for key in trained if key[3].startswith("from ")]
    sources = ("single1", "dp2", *(f"{strategy}2" for strategy in SEVERAL))
    kept = {f"from {name}-{optimizer}" for name in sources for optimizer in OPTIMIZERS}
    assert {(strategy, source) for strategy, _, source in across} >= {
        (strategy, source) for strategy in SEVERAL for source in kept
    } | {(strategy, source) for strategy in ("single", "dp") for source in kept}
    uninterrupted = {"SGD": "", "AdamW": "AdamW"}
    far = {
        key: difference(trained, *key[:2], "samples", key[2], of_single=uninterrupted[key[2].partition("-")[2]])
        for key in across
    }
    assert max(far.values()) <= BOUND, far
    assert difference(trained, "single", 1, "samples", "AdamW") > 1e-3
