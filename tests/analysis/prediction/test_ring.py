"""The time of a collective in a ring, and its fit."""

from __future__ import annotations

import numpy as np
import pytest

from harness.analysis.prediction.ring import RingCost, Timed, fit_ring
from harness.plan.rows import Collective

MIB = 2**20
SIZES = [2**power for power in range(12, 25)]


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def timed(cost: RingCost, operation: Collective, ranks: tuple[int, ...], noise: float = 0.0) -> list[Timed]:
    draw = np.random.default_rng(1)
    return [
        Timed(n, size, sum(cost.parts(operation, size, n)) * float(np.exp(noise * draw.standard_normal())))
        for n in ranks
        for size in SIZES
    ]


@pytest.mark.parametrize(
    ("operation", "latency", "transfer"),
    [("all_reduce", 0.5 + 6 * 0.1, 6 / 4), ("all_gather", 0.5 + 3 * 0.1, 3 / 4), ("reduce_scatter", 0.8, 3 / 4)],
)
def test_an_all_reduce_has_twice_the_steps(operation: Collective, latency: float, transfer: float) -> None:
    cost = RingCost(0.5, 0.1, 1.0, 0.0)
    assert cost.parts(operation, 1.0, 4) == pytest.approx((latency, transfer))
    assert cost.parts(operation, MIB, 1) == (0.0, 0.0), "one rank exchanges nothing"


def test_a_step_hides_the_latency_that_its_transfer_covers() -> None:
    latency, transfer = RingCost(0.0, 0.1, 1.0, 0.5).parts("all_reduce", 0.4, 4)
    assert latency == pytest.approx(6 * (0.1 - 0.5 * 0.1))
    assert transfer == pytest.approx(6 * 0.1)
    assert RingCost(0.0, 0.1, 1.0, 0.5).parts("all_reduce", 4.0, 4)[0] == 0.0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "cost", [RingCost(2e-5, 3e-5, 2e10, 0.0), RingCost(1e-4, 1e-3, 2.5e7, 0.5), RingCost(1e-6, 1e-5, 1e9, 0.0)]
)
def test_a_fit_to_few_ranks_holds_for_many(operation: Collective, cost: RingCost) -> None:
    fit = fit_ring(operation, timed(cost, operation, (2, 4)), [MIB, 8 * MIB], generator(), 5)
    assert fit is not None and fit.miss < 0.02
    for size in (MIB, 8 * MIB):
        expected = sum(cost.parts(operation, size, 16))
        assert sum(fit.cost.parts(operation, size, 16)) == pytest.approx(expected, rel=0.05)


def test_further_draws_are_as_wide_as_the_noise() -> None:
    cost = RingCost(1e-5, 1e-5, 1e8, 0.0)
    fit = fit_ring("all_reduce", timed(cost, "all_reduce", (2, 4), noise=0.05), [4 * MIB], generator(), 200)
    assert fit is not None
    drawn = [sum(other.parts("all_reduce", 4 * MIB, 8)) for other in fit.others]
    assert len(drawn) == 200
    assert 0.005 < np.std(np.log(drawn)) < 0.1
    assert np.mean(drawn) == pytest.approx(sum(cost.parts("all_reduce", 4 * MIB, 8)), rel=0.1)


def test_times_of_one_number_of_ranks_do_not_determine_a_start() -> None:
    cost = RingCost(1e-4, 1e-4, 1e9, 0.0)
    fit = fit_ring("all_reduce", timed(cost, "all_reduce", (2,)), [MIB], generator(), 3)
    assert fit is not None and fit.cost.start_s < 1e-8 and fit.miss < 0.02


def test_sizes_that_were_not_measured_have_no_fit() -> None:
    measured = timed(RingCost(1e-4, 1e-4, 1e9, 0.0), "all_reduce", (2, 4))
    assert fit_ring("all_reduce", measured, [2**40], generator(), 3) is None
    assert fit_ring("all_reduce", measured[:3], [SIZES[0]], generator(), 3) is None
    assert fit_ring("all_reduce", [], [MIB], generator(), 3) is None
    assert fit_ring("all_reduce", [Timed(1, MIB, 1e-6)] * 9, [MIB], generator(), 3) is None


def test_a_tree_is_not_a_ring() -> None:
    """Times that grow with the logarithm of the ranks, as a tree's, are missed by the fit."""
    measured = [
        Timed(n, size, 1e-5 * float(np.log2(n)) ** 3 + size / 1e9 / n) for n in (2, 4, 8, 16, 32, 64) for size in SIZES
    ]
    fit = fit_ring("all_reduce", measured, [2**13, 2**20], generator(), 3)
    assert fit is not None and fit.miss > 0.2
