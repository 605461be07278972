"""Which doubts are a run's usual state, and which cells are worse than that: these alone are marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb

import pandas as pd

from harness.analysis.doubts import LOUD, CountedDoubt, kind_of

USUAL = 0.5
"""A doubt is usual if more than this share of the run's timed trials have it: it says little about any one cell."""
CLEARLY = 0.05
"""A cell has clearly more of a usual doubt if chance gives it as many trials with a smaller probability than this."""
Share = tuple[int, int]
"""(trials with the doubt, timed trials)."""


def timed(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the timed trials, among which doubts are counted."""
    return trials[trials["throughput_per_s"].notna() & (trials["outcome"] == "ok")]


def usual_doubts(trials: pd.DataFrame) -> dict[str, Share]:
    """Return the usual doubts of a run by name, without ranks; the most frequent first."""
    counted = timed(trials)
    counts = Counter(kind for names in counted["doubts"] for kind in {*map(kind_of, names)})
    return {
        kind: (count, len(counted))
        for kind, count in counts.most_common()
        if count > USUAL * len(counted) and kind not in LOUD
    }


def unusual(doubts: Sequence[CountedDoubt], usual: Mapping[str, Share]) -> tuple[CountedDoubt, ...]:
    """Return those of a cell's doubts that are not usual, or that clearly more of its trials have than usual."""
    return tuple(doubt for doubt in doubts if not _is_usual(doubt, usual.get(kind_of(doubt.name))))


def _is_usual(doubt: CountedDoubt, share: Share | None) -> bool:
    if share is None:
        return False
    count, trials = share
    return tail(doubt.count, doubt.trials, count / trials) >= CLEARLY


def tail(count: int, trials: int, share: float) -> float:
    """Return the probability of ``count`` or more of ``trials`` if each has it with probability ``share``."""
    return sum(comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(count, trials + 1))
