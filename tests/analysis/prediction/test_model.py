"""A step by the laws, by a replay of its exchanges, and the time of a collective in a ring with its fit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.prediction.collective_times import RingCost, Timed, fit_ring
from harness.analysis.prediction.observed import Exchange, Size, net_step_times
from harness.analysis.prediction.step_model import by_laws, exposed_s
from harness.analysis.step_times import StepTimes
from harness.plan.rows import Collective

COSTS = {name: RingCost(0.0, 0.0, 1.0, 0.0) for name in ("all_reduce", "all_gather", "reduce_scatter")}
"""With two ranks an all-reduce takes a second a byte, the others half of it."""


def bucket(size: int, ready_s: float, needed_s: float) -> Exchange:
    return Exchange("all_reduce", size, ready_s, needed_s)


def gather(ready_s: float, needed_s: float) -> Exchange:
    return Exchange("all_gather", 4, ready_s, needed_s)


QUEUE = [bucket(4, 1.0, 6.0), bucket(4, 2.0, 6.0)]


def wait(exchanges: list[Exchange], *, ranks: int = 2, stretch: float = 1.0, lanes: int = 1) -> float:
    return exposed_s(exchanges, COSTS, ranks, stretch, lanes)  # type: ignore[arg-type]


EXPOSED: dict[str, tuple[list[Exchange], dict[str, Any], float]] = {
    "no exchange": ([], {}, 0.0),
    "one rank": ([bucket(5, 1.0, 2.0)], {"ranks": 1}, 0.0),
    "computation covers it": ([bucket(3, 1.0, 5.0)], {}, 0.0),
    "the last bucket is exposed whole": ([bucket(3, 5.0, 5.0)], {}, 3.0),
    "buckets queue": (QUEUE, {}, 1 + 4 + 4 - 6),
    "a gap in the queue is idle time of the link": ([bucket(1, 1.0, 9.0), bucket(4, 8.0, 9.0)], {}, 8 + 4 - 9),
    "slower computation covers more": (QUEUE, {"stretch": 2.0}, 0.0),
    "faster computation covers less": (QUEUE, {"stretch": 0.5}, 0.5 + 4 + 4 - 3),
    "blocking calls, as fsdp's on a CPU": ([gather(at, at) for at in (0.0, 1.0, 2.0)], {}, 3 * 2.0),  # each waits
    "a prefetched gather beside 3 s of computation": ([gather(0.0, 0.0), gather(0.0, 3.0)], {}, 2.0),
}


@pytest.mark.parametrize("case", EXPOSED)
def test_what_computation_does_not_cover_is_exposed(case: str) -> None:
    exchanges, given, exposed = EXPOSED[case]
    assert wait(exchanges, **given) == pytest.approx(exposed)


def test_lanes_overlap_latencies_but_not_transfers() -> None:
    costs = {"all_reduce": RingCost(2.0, 0.0, 1.0, 0.0)}
    buckets = [bucket(3, 0.0, 1.0), bucket(3, 0.0, 1.0)]
    assert exposed_s(buckets, costs, 2, 1.0, 1) == pytest.approx(2 + 3 + 2 + 3 - 1)  # type: ignore[arg-type]
    assert exposed_s(buckets, costs, 2, 1.0, 2) == pytest.approx(2 + 3 + 3 - 1)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 10)), min_size=1, max_size=12), st.integers(1, 3))
def test_what_is_exposed_lies_between_no_and_full_overlap(parts: list[tuple[int, float]], lanes: int) -> None:
    ready = sorted(at for _, at in parts)
    buckets = [bucket(size, at, ready[-1]) for (size, _), at in zip(parts, ready, strict=True)]
    total = float(sum(size for size, _ in parts))
    exposed = wait(buckets, lanes=lanes)
    assert -1e-9 <= exposed <= total + 1e-9
    ends = [at + size for (size, _), at in zip(parts, ready, strict=True)]
    assert exposed >= max(ends) - ready[-1] - 1e-9  # no exchange ends before its own time
    later = list(itertools.accumulate(parts, lambda end, part: end + part[0], initial=ready[0]))[-1] - ready[-1]
    assert exposed >= later - 1e-9  # nor all before the link has carried them


def test_steps_are_without_their_wait_for_data_unless_a_gpu_computes_meanwhile() -> None:
    trials = pd.MultiIndex.from_tuples([("waits", 1), ("unknown", 2), ("gpu", 1)])
    steps = [np.array([0.3, 0.2]), np.array([0.5, 0.4]), np.array([0.3, 0.2])]
    waits = [np.array([0.1, 0.0]), np.array([np.nan, np.nan]), np.array([0.25, 0.19])]
    found = net_step_times(StepTimes(trials, {"step_s": steps, "wait_s": waits}.__getitem__), {("gpu", 1)})
    assert found["waits", 1] == pytest.approx([0.2, 0.2]) and found["unknown", 2] == pytest.approx([0.5, 0.4])
    assert found["gpu", 1] == pytest.approx([0.3, 0.2])


def test_a_size_has_words() -> None:
    words = [size.words for size in (Size(1, 1), Size(4, 1), Size(64, 8))]
    assert words == ["1 device", "4 devices", "64 devices on 8 nodes"]


@pytest.mark.parametrize(("strong", "ideal"), [(False, 8.0), (True, 1.0)])
def test_a_law_is_met_by_what_follows_it_and_the_ideal_step_needs_one_device(strong: bool, ideal: float) -> None:
    assert by_laws({1: 8.0}, 8, strong=strong) == {"ideal": ideal}
    assert by_laws({2: 8.0, 4: 9.0}, 8, strong=strong) == {}

    def amdahl(n: int) -> float:
        return (8.0 / n if strong else 8.0) * (1 + 0.1 * (n - 1))

    def ring_line(n: int) -> float:
        return (8.0 / n if strong else 8.0) + 8 * (0.5 * (n - 1) / n + 0.01 * (n - 1))

    for name, step in (("amdahl", amdahl), ("ring_line", ring_line)):
        assert by_laws({n: step(n) for n in (1, 2, 4)}, 16, strong=strong)[name] == pytest.approx(step(16))
    found = by_laws({1: 8.0, 2: 7.0, 4: 6.0}, 8, strong=False)
    assert found == {"ideal": 8.0, "amdahl": 8.0, "ring_line": 8.0}, "no cost is below zero"


# -- the ring ---------------------------------------------------------------------------------------------------------


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
    measured = [Timed(2**n, size, 1e-5 * n**3 + size / 1e9 / 2**n) for n in range(1, 7) for size in SIZES]
    fit = fit_ring("all_reduce", measured, [2**13, 2**20], generator(), 3)
    assert fit is not None and fit.miss > 0.2
