"""Confidence intervals, with numbers that a reader can check by hand, and their coverage."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from harness.analysis.stats import (
    CLEAR,
    LEANING,
    OPEN,
    deciding_blocks,
    geometric_mean,
    half_width,
    holm,
    is_decided,
    look_significance,
    mean_interval,
    p_value,
    ratio_p_value,
    stein_blocks,
    word,
)
from tests.benchmarks.coverage import (
    BLOCKS,
    EXAMPLE,
    FOR_LOOKS,
    MUST_COVER,
    by_looks,
    coverage,
    false_alarms,
    false_decisions,
    improves_falsely,
    recorded,
    stated_claims,
)


def test_two_values_have_a_range_and_no_interval_and_shares_may_be_negative() -> None:
    estimate = geometric_mean([8.0, 2.0])
    assert (estimate.value, estimate.n) == (pytest.approx(4.0), 2)
    assert estimate.around() == {"low": None, "high": None, "least": 2.0, "most": 8.0}
    assert estimate.around("", 0.5, 1.0) == {"low": None, "high": None, "least": 2.0, "most": 5.0}
    assert geometric_mean([5.0]).around() == {"low": None, "high": None, "least": 5.0, "most": 5.0}
    pilot = [1.0, math.exp(0.1)]
    assert geometric_mean(pilot, pilot=2).low is None
    assert mean_interval([-1.0, 3.0]).around() == {"low": None, "high": None, "least": -1.0, "most": 3.0}
    estimate = mean_interval([-0.1, 0.0, 0.1])
    assert estimate.value == pytest.approx(0.0)
    assert estimate.high == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(
    ("logs", "pilot", "half"),
    [
        ([1.0, 2.0, 3.0], 0, 4.302653 * 1.0 / math.sqrt(3)),  # t(0.975, 2) times sd over sqrt(n)
        ([0.0, 0.1, 0.2], 2, 12.7062 * 0.1 / math.sqrt(2) / math.sqrt(3)),
        ([0.0, 0.1, 0.2, 5.0, -5.0], 3, 4.302653 * 0.1 / math.sqrt(5)),  # the pilot's spread and degrees of freedom
    ],
)
def test_the_interval_is_students_on_the_logarithms_of_the_pilot(logs: list[float], pilot: int, half: float) -> None:
    values = [math.exp(log) for log in logs]
    estimate = geometric_mean(values, pilot=pilot)
    assert math.log(estimate.value) == pytest.approx(sum(logs) / len(logs)) and estimate.n == len(logs)
    assert estimate.low is not None and estimate.high is not None
    above = math.log(estimate.high / estimate.value)
    assert math.log(estimate.value / estimate.low) == pytest.approx(above) and above == pytest.approx(half, rel=1e-4)


def test_values_without_a_logarithm_are_refused() -> None:
    for values in ([], [0.0], [-1.0, 2.0]):
        with pytest.raises(ValueError, match="needs positive values"):
            geometric_mean(values)


def test_the_number_of_blocks_is_steins_and_at_least_three() -> None:
    assert stein_blocks([math.exp(0.0), math.exp(0.1), math.exp(0.2)], 0.1) == 21
    assert stein_blocks([1.0, 1.0, 1.0, 1.0], 0.05) == 4
    assert stein_blocks([1.0, 1.0], 0.05) == 3  # two have no interval
    with pytest.raises(ValueError, match="two values"):
        stein_blocks([1.0], 0.05)


def test_the_blocks_that_decide_are_the_fewest_whose_interval_excludes_1_or_is_narrow() -> None:
    def half(blocks: int, spread: float) -> float:
        return half_width(spread / math.sqrt(blocks), blocks - 1)  # at 5 %

    for gain, spread in itertools.product((0.02, 0.1, 0.3), (0.01, 0.1, 0.4)):
        ratios = [math.exp(gain + spread * step) for step in (-1, 0, 1)]  # of standard deviation ``spread``
        wanted, found = max(gain, math.log1p(0.05)), deciding_blocks(ratios, 0.05, 0.05)
        assert half(found, spread) <= wanted and (found == 3 or half(found - 1, spread) > wanted), (gain, spread, found)
        assert deciding_blocks([1 / ratio for ratio in ratios], 0.05, 0.05) == found
        assert deciding_blocks(ratios, 0.05, 0.01) >= found
    assert deciding_blocks([2.0, 2.0], 0.05, 0.01) == 3
    with pytest.raises(ValueError, match="two values"):
        deciding_blocks([1.0], 0.05, 0.05)


def test_a_difference_is_clear_leaning_or_open_by_its_p_value() -> None:
    found = [word(value, 0.025) for value in (0.0, 0.025, 0.0251, 0.2, 0.2001, 1.0, None)]
    assert found == [CLEAR, CLEAR, LEANING, LEANING, OPEN, OPEN, OPEN]


def test_looks_at_a_run_spend_no_more_than_one_test_does() -> None:
    assert [look_significance(look) for look in (1, 2)] == [pytest.approx(0.025), pytest.approx(0.05 / 6)]
    assert 0.0499 < sum(look_significance(look) for look in range(1, 1000)) < 0.05


@pytest.mark.parametrize("noise", FOR_LOOKS)
def test_looks_until_a_comparison_is_decided_keep_false_decisions_and_intervals_at_five_per_cent(
    noise: str,
) -> None:
    apart, held, blocks = by_looks(FOR_LOOKS[noise], FOR_LOOKS[noise], draws=1000)
    assert apart <= 0.05 + 2 * 0.007 and held >= 0.95 - 2 * 0.007 and 6 < blocks <= 8  # 0.007: error of 1,000 draws


@pytest.mark.parametrize(
    ("ratios", "decided"),
    [
        ([1.5, 1.52, 1.48], True),
        ([1.0, 1.005, 0.995], True),  # about equal
        ([1.1, 1.2, 1.0], False),
        ([1.5, 1.5], False),  # too few
    ],
)
def test_a_comparison_is_decided_if_it_is_clear_or_about_equal(ratios: list[float], decided: bool) -> None:
    assert is_decided(ratios) == decided


@pytest.mark.parametrize("noise", FOR_LOOKS)
def test_blocks_that_are_added_until_a_difference_is_clear_make_few_false_decisions(noise: str) -> None:
    draws = 600
    margin = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert max(false_decisions(FOR_LOOKS[noise], draws=draws)) <= 0.05 + margin


@pytest.mark.parametrize(
    ("given", "adjusted"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # Holm's own order: 4 x 0.005, 3 x 0.01, 2 x 0.03, 0.04
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holms_adjustment_by_hand(given: list[float], adjusted: list[float]) -> None:
    assert holm(given) == pytest.approx(adjusted)
    assert holm([None, *given, None]) == [None, *(pytest.approx(value) for value in adjusted), None]


def test_the_p_value_is_students_from_three_values_and_that_of_196_standard_errors_is_5_percent() -> None:
    ratios = [math.e**1, math.e**2, math.e**3]
    score = 2 * math.sqrt(3)
    assert ratio_p_value(ratios) == pytest.approx(1 - score / math.sqrt(2 + score**2))
    assert ratio_p_value([1 / ratio for ratio in ratios]) == pytest.approx(ratio_p_value(ratios))
    assert ratio_p_value([1.1, 1.2]) is None
    assert ratio_p_value([]) is None
    assert ratio_p_value([1.0, 1.0, 1.0]) == 1.0
    assert ratio_p_value([1.1, 1.1, 1.1]) == pytest.approx(0.0, abs=1e-12)
    assert p_value(0.0392, 0.02, None) == pytest.approx(0.05, abs=1e-4)
    assert p_value(0.0, 0.0, 4) == 1.0


@pytest.mark.parametrize("pilot", [0, 2, 3])
def test_a_p_value_at_most_5_percent_is_an_interval_without_1(pilot: int) -> None:
    draw = random.Random(5)
    for _ in range(200):
        ratios = [math.exp(draw.gauss(0.05, 0.05)) for _ in range(5)]
        estimate, p = geometric_mean(ratios, pilot=pilot), ratio_p_value(ratios, pilot=pilot)
        assert p is not None and estimate.low is not None and estimate.high is not None
        assert (p <= 0.05) == (not estimate.low <= 1 <= estimate.high)


# -- coverage ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("noise", [*FOR_LOOKS, "as recorded"])
def test_options_that_change_nothing_are_seldom_confirmed_whatever_the_screening_chose(noise: str) -> None:
    claimed, of_confirmed = improves_falsely(FOR_LOOKS.get(noise) or recorded(EXAMPLE), draws=300)
    assert claimed <= of_confirmed <= 0.05
