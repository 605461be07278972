"""Intervals, with numbers a reader can check."""

from __future__ import annotations

import math
import random

import pytest

from harness.stats import geometric_mean, paired_ratio


def test_one_value_has_no_interval() -> None:
    estimate = geometric_mean([5.0])
    assert (estimate.value, estimate.low, estimate.high, estimate.n) == (pytest.approx(5.0), None, None, 1)


def test_the_geometric_mean_of_two_and_eight_is_four() -> None:
    assert geometric_mean([2.0, 8.0]).value == pytest.approx(4.0)


def test_the_interval_is_students_on_the_logarithms() -> None:
    estimate = geometric_mean([math.e**1, math.e**2, math.e**3])
    half = 4.302653 * 1.0 / math.sqrt(3)  # t(0.975, 2) times sd over sqrt(n)
    assert math.log(estimate.value) == pytest.approx(2.0)
    assert math.log(estimate.low or 0) == pytest.approx(2.0 - half, rel=1e-6)
    assert math.log(estimate.high or 0) == pytest.approx(2.0 + half, rel=1e-6)


def test_equal_values_have_an_interval_of_no_width() -> None:
    estimate = geometric_mean([3.0, 3.0, 3.0])
    assert (estimate.low, estimate.high) == (pytest.approx(3.0), pytest.approx(3.0))


def test_pairing_takes_out_what_blocks_share() -> None:
    drift = [1.0, 2.0, 0.5]
    estimate = paired_ratio([3.0 * d for d in drift], [2.0 * d for d in drift])
    assert estimate.value == pytest.approx(1.5)
    assert estimate.low == pytest.approx(1.5)
    assert estimate.high == pytest.approx(1.5)


@pytest.mark.parametrize("values", [[], [0.0], [-1.0, 2.0]])
def test_what_is_not_positive_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="needs positive values"):
        geometric_mean(values)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("n", [3, 6, 12])
def test_the_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(2000):
        drift = [math.exp(draw.gauss(0, 0.3)) for _ in range(n)]
        base = [d * math.exp(draw.gauss(0, 0.05)) for d in drift]
        cell = [1.7 * d * math.exp(draw.gauss(0, 0.05)) for d in drift]
        estimate = paired_ratio(cell, base)
        covered += (estimate.low or 0) <= 1.7 <= (estimate.high or 0)
    assert 0.93 <= covered / 2000 <= 0.97
