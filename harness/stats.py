"""Intervals over blocks: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval and the number of blocks; no ends where there is one block."""

    value: float
    low: float | None
    high: float | None
    n: int


def geometric_mean(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """The geometric mean of positive values, with a t interval on their logarithms.

    For throughputs of blocks, or ratios that were paired by block. Raises ValueError where there is no value
    or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"needs positive values, got {list(values)}")
    logs = [math.log(value) for value in values]
    n = len(logs)
    mean = sum(logs) / n
    if n == 1:
        return Estimate(math.exp(mean), None, None, 1)
    variance = sum((log - mean) ** 2 for log in logs) / (n - 1)
    half = float(student.ppf(0.5 + level / 2, n - 1)) * math.sqrt(variance / n)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def paired_ratio(values: Sequence[float], bases: Sequence[float], level: float = LEVEL) -> Estimate:
    """values / bases, block by block: what all blocks share, such as a slow hour, cancels."""
    return geometric_mean([value / base for value, base in zip(values, bases, strict=True)], level)
