"""Confidence intervals, with numbers that a reader can check by hand."""

from __future__ import annotations

import math
import random

import pytest

from harness.analysis.stats import (
    geometric_mean,
    holm,
    mean_interval,
    p_value,
    paired_ratio,
    ratio_p_value,
    stein_blocks,
)


def test_two_values_have_a_range_and_no_interval() -> None:
    estimate = geometric_mean([8.0, 2.0])
    assert (estimate.value, estimate.n) == (pytest.approx(4.0), 2)
    assert estimate.around() == {"low": None, "high": None, "least": 2.0, "most": 8.0}
    assert estimate.around(0.5, 1.0) == {"low": None, "high": None, "least": 2.0, "most": 5.0}
    assert geometric_mean([5.0]).around() == {"low": None, "high": None, "least": 5.0, "most": 5.0}
    assert mean_interval([-1.0, 3.0]).around() == {"low": None, "high": None, "least": -1.0, "most": 3.0}


def test_a_pilot_of_two_gives_an_interval_once_there_are_three_values() -> None:
    pilot = [math.exp(0.0), math.exp(0.1)]
    assert geometric_mean(pilot, pilot=pilot).low is None
    estimate = geometric_mean([*pilot, math.exp(0.2)], pilot=pilot)
    half = 12.7062 * 0.1 / math.sqrt(2) / math.sqrt(3)
    assert math.log(estimate.high or 0) == pytest.approx(0.1 + half, rel=1e-4)


def test_the_interval_is_students_on_the_logarithms() -> None:
    estimate = geometric_mean([math.e**1, math.e**2, math.e**3])
    half = 4.302653 * 1.0 / math.sqrt(3)  # t(0.975, 2) times sd over sqrt(n)
    assert math.log(estimate.value) == pytest.approx(2.0)
    assert math.log(estimate.low or 0) == pytest.approx(2.0 - half, rel=1e-6)
    assert math.log(estimate.high or 0) == pytest.approx(2.0 + half, rel=1e-6)


def test_equal_values_have_an_interval_of_no_width() -> None:
    estimate = geometric_mean([3.0, 3.0, 3.0])
    assert (estimate.low, estimate.high) == (pytest.approx(3.0), pytest.approx(3.0))


def test_pairing_removes_block_effects() -> None:
    drift = [1.0, 2.0, 0.5]
    estimate = paired_ratio([3.0 * d for d in drift], [2.0 * d for d in drift])
    assert estimate.value == pytest.approx(1.5)
    assert estimate.low == pytest.approx(1.5)
    assert estimate.high == pytest.approx(1.5)


@pytest.mark.parametrize("values", [[], [0.0], [-1.0, 2.0]])
def test_values_that_are_not_positive_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="needs positive values"):
        geometric_mean(values)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("n", [3, 6, 12])
def test_interval_coverage_equals_the_confidence_level(n: int) -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(2000):
        drift = [math.exp(draw.gauss(0, 0.3)) for _ in range(n)]
        base = [d * math.exp(draw.gauss(0, 0.05)) for d in drift]
        cell = [1.7 * d * math.exp(draw.gauss(0, 0.05)) for d in drift]
        estimate = paired_ratio(cell, base)
        covered += (estimate.low or 0) <= 1.7 <= (estimate.high or 0)
    assert 0.93 <= covered / 2000 <= 0.97


def test_steins_number_of_blocks_by_hand() -> None:
    # logs 0, 0.1, 0.2: s0 = 0.1, t(0.975, 2) = 4.302653; d = log(1.1) = 0.0953102; (t s0 / d)^2 = 20.38
    pilot = [math.exp(0.0), math.exp(0.1), math.exp(0.2)]
    assert stein_blocks(pilot, 0.1) == 21


def test_a_pilot_without_noise_needs_no_more_blocks() -> None:
    assert stein_blocks([1.0, 1.0, 1.0, 1.0], 0.05) == 4
    assert stein_blocks([1.0, 1.0], 0.05) == 3  # two have no interval
    with pytest.raises(ValueError, match="two values"):
        stein_blocks([1.0], 0.05)


def test_the_two_stage_interval_keeps_the_pilots_spread_and_degrees_of_freedom() -> None:
    logs = [0.0, 0.1, 0.2, 5.0, -5.0]
    values = [math.exp(log) for log in logs]
    estimate = geometric_mean(values, pilot=values[:3])
    half = 4.302653 * 0.1 / math.sqrt(5)
    assert estimate.n == 5
    assert math.log(estimate.high or 0) - math.log(estimate.value) == pytest.approx(half, rel=1e-6)


def test_a_two_stage_interval_is_as_narrow_as_asked() -> None:
    generator = random.Random(3)
    for _ in range(50):
        values = [math.exp(generator.gauss(0, 0.1)) for _ in range(2000)]
        needed = stein_blocks(values[:3], 0.05)
        if needed <= 2000:
            estimate = geometric_mean(values[:needed], pilot=values[:3])
            assert estimate.halfwidth is not None
            assert estimate.halfwidth <= 0.05 + 1e-9


def test_the_mean_of_shares_may_be_negative() -> None:
    estimate = mean_interval([-0.1, 0.0, 0.1])
    assert estimate.value == pytest.approx(0.0)
    assert estimate.high == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-4)


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


def test_the_p_value_of_ratios_is_students() -> None:
    # logs 1, 2, 3: mean 2, sd 1, t = 2 sqrt(3) = 3.4641; of two degrees of freedom p = 1 - t / sqrt(2 + t^2)
    ratios = [math.e**1, math.e**2, math.e**3]
    score = 2 * math.sqrt(3)
    assert ratio_p_value(ratios) == pytest.approx(1 - score / math.sqrt(2 + score**2))
    assert ratio_p_value([1 / ratio for ratio in ratios]) == pytest.approx(ratio_p_value(ratios))


def test_a_p_value_needs_three_values() -> None:
    assert ratio_p_value([1.1, 1.2]) is None
    assert ratio_p_value([]) is None
    assert ratio_p_value([1.0, 1.0, 1.0]) == 1.0
    assert ratio_p_value([1.1, 1.1, 1.1]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("pilot", [None, 2, 3])
def test_a_p_value_at_most_5_percent_is_an_interval_without_1(pilot: int | None) -> None:
    draw = random.Random(5)
    for _ in range(200):
        ratios = [math.exp(draw.gauss(0.05, 0.05)) for _ in range(5)]
        first = ratios[:pilot] if pilot else None
        estimate, p = geometric_mean(ratios, pilot=first), ratio_p_value(ratios, pilot=first)
        assert p is not None and estimate.low is not None and estimate.high is not None
        assert (p <= 0.05) == (not estimate.low <= 1 <= estimate.high)


def test_the_normal_p_value_of_196_standard_errors_is_5_percent() -> None:
    assert p_value(0.0392, 0.02, None) == pytest.approx(0.05, abs=1e-4)
    assert p_value(0.0, 0.0, 4) == 1.0
