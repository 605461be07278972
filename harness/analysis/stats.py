"""Confidence intervals over blocks: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

SIGNIFICANCE = 0.05
LEVEL = 1 - SIGNIFICANCE
LOOKS_SIGNIFICANCE = 0.02
"""The significance of each of the three looks of ``blocks: decide``: 4.97 % together (simulated: benchmarks/coverage).

So does an interval of this significance hold the truth at every look in at least 95 % of runs.
"""
LEAST_BLOCKS = 3
"""The fewest blocks of a t interval or test: of two, the half-width is 6 times their difference."""
EQUAL_WITHIN = 0.05
"""The relative half-width from which on an open comparison is decided: both are about equal."""
ENDS = ("low", "high", "least", "most")
"""The ends of an interval, and of the values that it is of."""


@dataclass(frozen=True)
class Estimate:
    """A value, the ends of its confidence interval, the number of blocks, and the smallest and largest block's value.

    The ends are None with fewer than LEAST_BLOCKS blocks.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    least: float
    most: float

    def around(self, name: str = "", factor: float = 1.0, shift: float = 0.0) -> dict[str, float | None]:
        """Return the ends of the interval and of the range by their columns, each times ``factor`` plus ``shift``.

        ``name``: of the value, with which the names of the columns begin; '' for the one value of a row.
        """
        ends = {f"{name}_{end}" if name else end: getattr(self, end) for end in ENDS}
        return {column: None if value is None else factor * value + shift for column, value in ends.items()}

    @property
    def halfwidth(self) -> float | None:
        """The half-width of the interval of the logarithm, as a relative size: 0.05 for 'within 5 %'."""
        return None if self.high is None else self.high / self.value - 1.0


def geometric_mean(values: Sequence[float], *, pilot: int = 0, significance: float = SIGNIFICANCE) -> Estimate:
    """Return the geometric mean of positive values, with a t interval on their logarithms.

    For throughputs of blocks, or ratios paired by block. ``pilot``: how many of the first values determined
    the number of blocks; the interval then uses their standard deviation and degrees of freedom (Stein 1945, Ann. Math.
    Statist. 16(3)). Raises ValueError if there is no value, or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"needs positive values, got {list(values)}")
    of_logs = mean_interval([math.log(value) for value in values], pilot=pilot, significance=significance)
    low, high = (None if end is None else math.exp(end) for end in (of_logs.low, of_logs.high))
    return Estimate(math.exp(of_logs.value), low, high, len(values), min(values), max(values))


def mean_interval(values: Sequence[float], *, pilot: int = 0, significance: float = SIGNIFICANCE) -> Estimate:
    """Return the mean of values of any sign, with a t interval. ``pilot``: see geometric_mean."""
    n = len(values)
    mean = sum(values) / n
    first = values[:pilot] if pilot > 1 else values
    if n < LEAST_BLOCKS:
        return Estimate(mean, None, None, n, min(values), max(values))
    half = _t(len(first) - 1, significance) * deviation(first) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n, min(values), max(values))


def stein_blocks(pilot: Sequence[float], halfwidth: float) -> int:
    """Return the number of blocks that brings the interval within ``halfwidth`` (relative), by a pilot's values.

    n = max(n0, ceil((t s0 / d)^2)) with the pilot's n0 and the standard deviation s0 of its logarithms, d =
    log(1 + halfwidth) and t of n0 - 1 degrees of freedom (Stein 1945); at least LEAST_BLOCKS, as fewer have no
    interval. Raises ValueError if there are fewer than two values, or one that is not positive.
    """
    if len(pilot) < 2:
        raise ValueError(f"a pilot needs two values, got {list(pilot)}")
    logs = [math.log(value) for value in pilot]
    needed = (_t(len(logs) - 1) * deviation(logs) / math.log1p(halfwidth)) ** 2
    return max(len(logs), LEAST_BLOCKS, math.ceil(needed - 1e-9))


def deciding_blocks(ratios: Sequence[float], halfwidth: float, significance: float) -> int:
    """Return the number of blocks that decides a comparison, if mean and spread of its ratios stay as they are.

    The least n for which t(n - 1) s / sqrt(n), at this significance, is at most the mean m of the logarithms, so that
    the difference is clear, or ``halfwidth`` (relative): two settings that differ by less are about equal. At least
    LEAST_BLOCKS. Raises ValueError if there are fewer than two values, or one that is not positive.
    """
    if len(ratios) < 2:
        raise ValueError(f"a comparison needs two values, got {list(ratios)}")
    logs = [math.log(ratio) for ratio in ratios]
    spread, wanted = deviation(logs), max(abs(sum(logs) / len(logs)), math.log1p(halfwidth))
    normal = (NormalDist().inv_cdf(1 - significance / 2) * spread / wanted) ** 2  # t is larger than its limit
    blocks = max(len(logs), LEAST_BLOCKS, math.ceil(normal))
    while _t(blocks - 1, significance) * spread / math.sqrt(blocks) > wanted:
        blocks += 1
    return blocks


def is_decided(ratios: Sequence[float], halfwidth: float = EQUAL_WITHIN) -> bool:
    """Return whether a look of ``blocks: decide`` ends a comparison: by a clear difference, or a narrow interval."""
    p_value = ratio_p_value(ratios)
    if p_value is None:
        return False
    width = geometric_mean(ratios, significance=LOOKS_SIGNIFICANCE).halfwidth
    return p_value <= LOOKS_SIGNIFICANCE or (width is not None and width <= halfwidth)


def look_significance(look: int) -> float:
    """Return the significance of a look at a run, from 1: SIGNIFICANCE / (look (look + 1)).

    Over any number of looks these add up to at most SIGNIFICANCE, so that adding blocks until a difference is clear
    makes no more false claims than that (alpha spending; the sum of 1 / (j (j + 1)) is 1).
    """
    return SIGNIFICANCE / (look * (look + 1))


CLEAR, LEANING, OPEN = "clear", "leaning", "open"
MOST_OF_LEANING = 0.20


def word(p_value: float | None, significance: float) -> str:
    """Return how sure a difference is, by its p-value: clear at this significance, leaning, or open.

    Leaning up to MOST_OF_LEANING, which is no claim; open without a p-value.
    """
    if p_value is None or p_value > MOST_OF_LEANING:
        return OPEN
    return CLEAR if p_value <= significance else LEANING


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the adjusted p-values, in the given order: those at most alpha keep the family-wise error below alpha.

    The i-th smallest of m is multiplied by m - i + 1, then raised to the largest before it, at most 1 (Holm 1979,
    Scand. J. Statist. 6(2)). Holds for any dependence between the tests. None, for what was not tested, stays None and
    does not count.
    """
    known = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        adjusted[index] = largest
    return adjusted


def ratio_p_value(ratios: Sequence[float], *, pilot: int = 0) -> float | None:
    """Return the p-value of a two-sided t test that the mean logarithm is 0; None below 3 values.

    At most 0.05 if and only if the interval of ``geometric_mean`` at 95 % excludes 1. ``pilot``: see geometric_mean.
    """
    logs = [math.log(ratio) for ratio in ratios]
    first = logs[:pilot] if pilot > 1 else logs
    if len(logs) < LEAST_BLOCKS:
        return None
    return p_value(sum(logs) / len(logs), deviation(first) / math.sqrt(len(logs)), len(first) - 1)


def p_value(difference: float, error: float, freedom: int | None) -> float:
    """Return the two-sided p-value of a difference with this standard error; the normal one if ``freedom`` is None."""
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    from scipy import stats

    score = abs(difference) / error
    return 2 * float(stats.norm.sf(score) if freedom is None else stats.t.sf(score, freedom))


def half_width(error: float, freedom: int | None) -> float:
    """Return the half-width of a t interval with this standard error; of a normal one if ``freedom`` is None."""
    return error * (NormalDist().inv_cdf(0.5 + LEVEL / 2) if freedom is None else _t(freedom))


def pooled_deviation(samples: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation that samples with different means share, and its degrees of freedom.

    sqrt(sum of (n - 1) s^2 / sum of (n - 1)): of one sample, its own. Raises ZeroDivisionError without two values.
    """
    known = [sample for sample in samples if len(sample) > 1]
    freedom = sum(len(sample) - 1 for sample in known)
    return math.sqrt(sum((len(sample) - 1) * deviation(sample) ** 2 for sample in known) / freedom), freedom


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, with n - 1."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


@lru_cache(maxsize=256)
def _t(freedom: int, significance: float = SIGNIFICANCE) -> float:
    from scipy.stats import t as student  # its import takes half a second, which most users of this module save

    return float(student.ppf(1 - significance / 2, freedom))
