"""The replay of exchanges beside computation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.prediction.observed import Exchange
from harness.analysis.prediction.ring import RingCost
from harness.analysis.prediction.step_model import exposed_s

COSTS = {name: RingCost(0.0, 0.0, 1.0, 0.0) for name in ("all_reduce", "all_gather", "reduce_scatter")}
"""With two ranks an all-reduce takes a second a byte, the others half of it."""


def bucket(size: int, ready_s: float, needed_s: float) -> Exchange:
    return Exchange("all_reduce", size, ready_s, needed_s)


def wait(exchanges: list[Exchange], *, ranks: int = 2, stretch: float = 1.0, lanes: int = 1) -> float:
    return exposed_s(exchanges, COSTS, ranks, stretch, lanes)  # type: ignore[arg-type]


def test_nothing_is_exposed_without_exchanges_or_with_one_rank() -> None:
    assert wait([]) == 0.0
    assert wait([bucket(5, 1.0, 2.0)], ranks=1) == 0.0


def test_an_exchange_that_computation_covers_is_not_exposed() -> None:
    assert wait([bucket(3, 1.0, 5.0)]) == 0.0


def test_the_last_bucket_is_exposed_whole() -> None:
    assert wait([bucket(3, 5.0, 5.0)]) == 3.0


def test_buckets_queue() -> None:
    assert wait([bucket(4, 1.0, 6.0), bucket(4, 2.0, 6.0)]) == pytest.approx(1 + 4 + 4 - 6)


def test_a_gap_in_the_queue_is_idle_time_of_the_link() -> None:
    assert wait([bucket(1, 1.0, 9.0), bucket(4, 8.0, 9.0)]) == pytest.approx(8 + 4 - 9)


def test_slower_computation_covers_more() -> None:
    buckets = [bucket(4, 1.0, 6.0), bucket(4, 2.0, 6.0)]
    assert wait(buckets, stretch=2.0) == pytest.approx(max(0.0, 2 + 4 + 4 - 12))
    assert wait(buckets, stretch=0.5) == pytest.approx(0.5 + 4 + 4 - 3)


def test_blocking_calls_are_exposed_one_after_the_other() -> None:
    """As fsdp's on a CPU: what is ready is needed at once, and later calls come later by that."""
    calls = [Exchange("all_gather", 4, at, at) for at in (0.0, 1.0, 2.0)]
    assert wait(calls) == pytest.approx(3 * 2.0)


def test_a_prefetched_gather_runs_beside_the_computation_before() -> None:
    calls = [Exchange("all_gather", 4, 0.0, 0.0), Exchange("all_gather", 4, 0.0, 3.0)]
    # the first is waited for; the second follows it on the link, beside 3 s of computation
    assert wait(calls) == pytest.approx(2.0)


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
