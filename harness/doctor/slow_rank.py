"""Slow rank: the step of each rank on the same part of the batch, without the others, against the fastest rank's."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from harness.doctor.check import Case, Check, any_error
from harness.doctor.steps import observe_own_part
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding

NAME = "slow rank"
SLOW, LEAST_S = 2.5, 0.005
"""A rank is slow if its step takes this many times as long as the fastest rank's, and as many seconds more."""
ROUNDS, PAUSE_S = 8, 0.05
"""Most repetitions of the steps while a rank is slow, and the time before the first; each is twice as long."""


def observe(subject: Subject) -> float:
    """Return the seconds of this rank's fastest step alone.

    If a rank is slow, the steps are repeated, all ranks with the first rank's part of the batch: parts may differ in
    their cost, and other load may pass.
    """
    seconds = [steps.own_step_s for steps in subject.steps]
    own, same = math.inf, replace(subject, ranks=replace(subject.ranks, rank=0))
    for number in range(ROUNDS):
        if not _slow(seconds):
            break
        time.sleep(PAUSE_S * 2**number)
        own = min(own, observe_own_part(same.fresh()).step_s)
        seconds = subject.ranks.gather(own)
    return seconds[subject.ranks.rank]


def judge(seen: Sequence[float], case: Case) -> list[Finding]:
    """Compare the fastest step of each rank alone."""
    slow = _slow(seen)
    if not slow:
        return []
    times = ", ".join(f"{1000 * seconds:.1f}" for seconds in seen)
    return [
        Finding(
            NAME,
            "warning",
            f"time of the same step on ranks 0 to {len(seen) - 1}, each without the others: {times} ms; slow: rank "
            f"{', '.join(map(str, slow))}",
            "a step of several ranks takes as long as on the slowest: the others wait",
            "look for work that one rank alone does (logging, metrics, files), and for other load on its host",
        )
    ]


def _slow(seconds: Sequence[float]) -> list[int]:
    fastest = min(seconds)
    return [rank for rank, own in enumerate(seconds) if own > max(SLOW * fastest, fastest + LEAST_S)]


CHECK = Check(
    NAME, observe, judge, needs_peers=True, redundant=any_error, about=("loss", "forward"), clue=r"get_rank|RANK"
)
