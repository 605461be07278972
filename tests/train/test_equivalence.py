"""From the same start, on the same global batches, every strategy ends where one device ends."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence import FAULTS, SEVERAL, WORKLOADS

pytestmark = pytest.mark.slow

BOUND = 1e-5
Results = dict[tuple[str, int, str, str], list[float]]


def difference(trained: Results, strategy: str, devices: int, workload: str, fault: str = "") -> float:
    """Relative difference from one device, norm over norm."""
    mine = torch.tensor(trained[strategy, devices, workload, fault])
    alone = torch.tensor(trained["single", 1, workload, ""])
    return float((mine - alone).norm() / alone.norm())


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [(name, devices) for name in ("dp", *SEVERAL) for devices in (1, 2, 3)],
)
def test_every_strategy_trains_as_one_device_does(trained: Results, strategy: str, devices: int, workload: str) -> None:
    assert difference(trained, strategy, devices, workload) <= BOUND


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("strategy", "devices"), [(name, devices) for name in SEVERAL for devices in (2, 3)])
def test_planted_faults_are_found(trained: Results, strategy: str, devices: int, fault: str) -> None:
    assert difference(trained, strategy, devices, "samples", fault) > 10 * BOUND


@pytest.mark.parametrize("workload", WORKLOADS)
def test_training_moved_the_parameters(trained: Results, workload: str) -> None:
    assert difference(trained, "untrained", 1, workload) > 100 * BOUND


def test_weights_of_samples_matter(trained: Results) -> None:
    start = torch.tensor(trained["single", 1, "samples", ""])
    other = torch.tensor(trained["single", 1, "tokens", ""])
    assert float((start - other).norm() / start.norm()) > 1e-3


def otherwise(trained: Results, strategy: str, devices: int, name: str, reference: str) -> float:
    mine = torch.tensor(trained[strategy, devices, "otherwise", name])
    alone = torch.tensor(trained["single", 1, "otherwise", reference])
    return float((mine - alone).norm() / alone.norm())


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_a_model_of_the_meta_device_trains_as_on_one_device(trained: Results, strategy: str, devices: int) -> None:
    assert otherwise(trained, strategy, devices, "meta", "meta") <= BOUND
    assert otherwise(trained, "single", 1, "meta", "fp32") > 0.1  # its initial values are others


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
def test_arithmetic_in_16_bits_trains_as_on_one_device_within_its_rounding(
    trained: Results, strategy: str, devices: int, name: str, reference: str
) -> None:
    assert 0 < otherwise(trained, strategy, devices, name, "fp32") < 0.01
    assert otherwise(trained, strategy, devices, name, reference) < 0.01


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("strategy", SEVERAL)
def test_an_overflow_on_one_rank_is_a_skip_on_every_rank(trained: Results, strategy: str, devices: int) -> None:
    assert trained[strategy, devices, "otherwise", "scales"] == [512.0] * devices
