"""Steady state: the end of a trial's warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.plan.thresholds import STEADY_CHANGE, STEADY_NOISE

TREND_NOISE = 3.2
"""Bound of 95 % of trends by noise alone, in notches: 1.96 sqrt(12 / n) sigma, with sigma = IQR / 1.349."""
STEADY_STEPS = 500
"""Longer rounds are thinned to about this number of steps: the trend takes all pairs of them."""


def is_steady(rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether the last two rounds of step times are alike and the last shows no trend.

    Alike: their medians differ by at most STEADY_CHANGE, or by no more than their noise, which is taken as the
    notch 1.57 IQR / sqrt(n) of each (McGill, Tukey and Larsen 1978), up to STEADY_NOISE. No trend: the Theil-Sen
    line (Sen 1968: the median of all pairs' slopes) changes by no more than that over the last round.
    """
    if len(rounds) < 2 or min(len(rounds[-1]), len(rounds[-2])) < 2:
        return False
    before, last = (np.asarray(steps, dtype=float)[:: 1 + len(steps) // STEADY_STEPS] for steps in rounds[-2:])
    middle = float(np.median(last))

    def allowed(noise: float) -> float:
        return max(STEADY_CHANGE * middle, min(noise, STEADY_NOISE * middle))

    if abs(float(np.median(before)) - middle) > allowed(_notch(before) + _notch(last)):
        return False
    first, second = np.triu_indices(len(last), 1)
    slope = float(np.median((last[second] - last[first]) / (second - first)))
    return abs(slope) * (len(last) - 1) <= allowed(TREND_NOISE * _notch(last))


def _notch(values: np.ndarray) -> float:
    low, high = np.percentile(values, (25, 75))
    return 1.57 * float(high - low) / math.sqrt(len(values))
