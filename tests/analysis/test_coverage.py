"""The coverage of the confidence intervals is their nominal level."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.coverage import BLOCKS, MUST_COVER, coverage, false_alarms, stated_claims


@pytest.mark.parametrize("two_stage", [False, True], ids=["fixed", "two-stage"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("noise", MUST_COVER)
def test_interval_coverage_is_93_to_97_percent(noise: str, blocks: int, two_stage: bool) -> None:
    assert 0.93 <= coverage(MUST_COVER[noise], blocks, two_stage) <= 0.97


@pytest.mark.parametrize(("earlier", "cells"), [(3, 1), (5, 6)])
def test_runs_without_a_change_are_claimed_to_differ_in_at_most_5_percent(earlier: int, cells: int) -> None:
    adjusted, unadjusted, by_blocks = false_alarms(earlier, cells, draws=600)
    assert adjusted <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)
    assert adjusted >= 0.02 if cells == 1 else unadjusted > adjusted
    assert by_blocks > 0.5  # the reason that blocks of two runs are no replicates


@pytest.mark.parametrize(("times", "blocks", "cells"), [(1.2, 2, 1), (1.5, 3, 1), (4, 2, 1), (4, 5, 1), (4, 3, 6)])
@pytest.mark.parametrize("shared", [True, False], ids=["of runs", "of blocks"])
def test_runs_that_spread_more_than_stated_are_claimed_to_differ_in_at_most_5_percent(
    times: float, blocks: int, cells: int, shared: bool
) -> None:
    draws = 500 if cells == 1 else 100
    claimed, by_stated = stated_claims(times, blocks, cells, shared=shared, draws=draws)
    assert claimed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    if shared:
        assert by_stated > (0.5 if times == 4 else 0.08)  # what the stated noise alone would claim


@pytest.mark.parametrize("shared", [True, False], ids=["of runs", "of blocks"])
def test_a_change_of_five_times_the_spread_is_found_in_runs_that_spread_more_than_stated(shared: bool) -> None:
    claimed, _ = stated_claims(4, 5, 1, shared=shared, planted=5, draws=300)
    assert claimed >= 0.8


def test_runs_that_spread_less_than_stated_are_judged_by_the_stated_noise() -> None:
    claimed, by_stated = stated_claims(0.2, 5, 1, shared=True, planted=14, draws=200)  # of which the half is claimed
    assert claimed == by_stated and 0.2 < claimed < 0.8
