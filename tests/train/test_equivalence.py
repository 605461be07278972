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
