"""From the same start, on the same global batches, every strategy ends where one device ends.

With accumulation and clipping too, and going on from a checkpoint of any strategy.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.equivalence import FAULTS, SEVERAL, WORKLOADS
from tests.trained import OPTIMIZERS, RECIPES

pytestmark = pytest.mark.slow

BOUND = 1e-5
Results = dict[tuple[str, int, str, str], list[float]]
PLACED = [(strategy, devices) for strategy in ("dp", *SEVERAL) for devices in (1, 2, 3)]


def difference(
    trained: Results, strategy: str, devices: int, workload: str, what: str = "", *, of_single: str = ""
) -> float:
    """Relative difference from one device, norm over norm."""
    mine = torch.tensor(trained[strategy, devices, workload, what])
    alone = torch.tensor(trained["single", 1, workload, of_single])
    return float((mine - alone).norm() / alone.norm())


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("strategy", "devices"), PLACED)
def test_every_strategy_trains_as_one_device_does(trained: Results, strategy: str, devices: int, workload: str) -> None:
    assert difference(trained, strategy, devices, workload) <= BOUND


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("strategy", "devices"), [(name, devices) for name in SEVERAL for devices in (2, 3)])
def test_planted_faults_are_found(trained: Results, strategy: str, devices: int, fault: str) -> None:
    assert difference(trained, strategy, devices, "samples", fault) > 10 * BOUND


def test_training_moved_the_parameters_and_weights_of_samples_and_clipping_matter(trained: Results) -> None:
    assert min(difference(trained, "untrained", 1, workload) for workload in WORKLOADS) > 100 * BOUND
    start, other = (torch.tensor(trained["single", 1, unit, ""]) for unit in ("samples", "tokens"))
    assert float((start - other).norm() / start.norm()) > 1e-3
    assert difference(trained, "single", 1, "samples", "clipped") > 1e-3


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_model_of_the_meta_device_trains_as_on_one_device(trained: Results, strategy: str, devices: int) -> None:
    assert difference(trained, strategy, devices, "otherwise", "meta", of_single="meta") <= BOUND
    # its initial values are others
    assert difference(trained, "single", 1, "otherwise", "meta", of_single="fp32") > 0.1


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("strategy", "name", "reference"),
    [
        *((strategy, name, name) for strategy in SEVERAL for name in ("bf16", "fp16")),
        ("fsdp", "autocast", "bf16"),
        ("ddp", "bf16_compress", "fp32"),
        ("ddp", "fp16_compress", "fp32"),
    ],
)
def test_16_bits_train_up_to_rounding(trained: Results, strategy: str, devices: int, name: str, reference: str) -> None:
    assert 0 < difference(trained, strategy, devices, "otherwise", name, of_single="fp32") < 0.01
    assert difference(trained, strategy, devices, "otherwise", name, of_single=reference) < 0.01


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
@pytest.mark.parametrize(("name", "reference"), [("checkpointed", "fp32"), ("meta checkpointed", "meta")])
def test_recomputed_activations_train_as_kept_ones(
    trained: Results, strategy: str, devices: int, name: str, reference: str
) -> None:
    assert difference(trained, strategy, devices, "otherwise", name, of_single=reference) <= BOUND


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_an_overflow_on_one_rank_is_a_skip_on_every_rank(trained: Results, strategy: str, devices: int) -> None:
    assert trained[strategy, devices, "otherwise", "scales"] == [512.0] * devices


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), *PLACED])
def test_all_accumulate_and_clip_alike(trained: Results, strategy: str, devices: int, recipe: str, unit: str) -> None:
    plain = "" if recipe == "accumulated" else "clipped"
    assert difference(trained, strategy, devices, unit, recipe, of_single=plain) <= BOUND


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_gradients_are_reduced_once_a_step_if_accumulated(trained: Results, strategy: str, world_size: int) -> None:
    plain, accumulated = trained[strategy, world_size, "samples", "exchanges"]
    assert plain == accumulated >= 4


def test_a_checkpoint_of_any_strategy_goes_on_under_any(trained: Results) -> None:
    across = [(key[0], key[1], key[3]) for key in trained if key[3].startswith("from ")]
    sources = ("single1", "dp2", *(f"{strategy}2" for strategy in SEVERAL))
    kept = {f"from {name}-{optimizer}" for name in sources for optimizer in OPTIMIZERS}
    assert {(strategy, source) for strategy, _, source in across} >= {*product(("single", "dp", *SEVERAL), kept)}
    uninterrupted = {"SGD": "", "AdamW": "AdamW"}
    single = {key: uninterrupted[key[2].partition("-")[2]] for key in across}
    far = {key: difference(trained, *key[:2], "samples", key[2], of_single=single[key]) for key in across}
    assert max(far.values()) <= BOUND, far
    assert difference(trained, "single", 1, "samples", "AdamW") > 1e-3
