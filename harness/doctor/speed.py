"""Speed: the loader alone against the model alone, and the same step on each rank without the others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from harness.doctor.check import Case, Check, any_error
from harness.doctor.steps import observe_own_part
from harness.doctor.subject import Subject, processors
from harness.plan.cell import int_option
from harness.plan.checks import Finding
from harness.train.loader import batches, endless_shares

NAME = "loader throughput"
SECONDS, LIMIT_S = 0.3, 10.0
"""Least time of the timed batches, and the limit of the whole measurement."""
MARGIN = 1.25
"""Least ratio of the loader's time to the model's that is a finding: both are short, and a machine's speed varies."""
LEAST, MOST_SAMPLES = 3, 64
"""Smallest number of timed batches, and largest number of samples in the batch of a rank."""
SLOW_RANK = "slow rank"
SLOW, LEAST_S = 2.5, 0.005
"""A rank is slow if its step takes this many times as long as the fastest rank's, and as many seconds more."""
ROUNDS, PAUSE_S = 8, 0.05
"""Most repetitions of the steps while a rank is slow, and the time before the first; each is twice as long."""


@dataclass(frozen=True)
class Rate:
    """Seconds a sample of all ranks' loaders. ``complete``: False if time was up, so that they are an upper bound.

    ``processors``: those of the node that this process may use, for each of the node's devices.
    """

    sample_s: float
    complete: bool = True
    processors: int = 1


def observe(subject: Subject) -> Rate | None:
    """Return the steady rate of the loader; None if the data is on the device."""
    cell, ranks = subject.cell, subject.ranks
    if cell.data == "synthetic_device":
        return None
    batch = min(cell.global_batch_size, MOST_SAMPLES * ranks.world_size)
    fetch = batches(
        subject.datasets[0],
        endless_shares(subject.training_samples, batch, subject.seed, ranks.rank, ranks.world_size),
        seed=subject.seed,
        ranks=ranks,
        options=cell.loader,
        collate=getattr(subject.workload, "collate", None),
    )
    workers = int_option(cell.loader, "workers", 0) * subject.replicas
    batch_s, complete = time_batches(fetch, workers, int_option(cell.loader, "prefetch_factor", 2))
    return Rate(batch_s / batch, complete, processors() // (cell.devices // cell.nodes))


def time_batches(
    fetch: Iterator[object], workers: int, prefetch: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, bool]:
    """Return the seconds of a batch, from the median of at least two full rounds of all workers, and True.

    Workers deliver in bursts of one batch each, so that the median gap between batches is the time to take a ready one;
    a round of all workers has one burst. The first batches are left out: the workers start, and fill their queues. If
    time is up, the value is the mean of all batches since the start, which is longer, and the second one is False.
    """
    size = max(1, workers)
    start = clock()
    dropped = max(1, workers * prefetch)
    ends: list[float] = []  # of the last batch left out, and of each round after it
    for taken, _ in enumerate(fetch, 1):
        now = clock()
        if taken >= dropped and (taken - dropped) % size == 0:
            ends.append(now)
            timed = taken - dropped
            if timed >= max(LEAST, 2 * workers) and now - ends[0] >= SECONDS:
                return statistics.median(late - early for early, late in pairwise(ends)) / size, True
        if now - start >= LIMIT_S:
            return (now - start) / taken, False
    raise ValueError("the loader ended: it must be endless")


def judge(seen: Sequence[Rate | None], case: Case) -> list[Finding]:
    slowest = _slowest(seen)
    if slowest is None:
        return []
    loader = slowest.sample_s
    model = _step_s(case) / case.cell.global_batch_size
    if loader <= MARGIN * model:
        return []
    workers = int_option(case.cell.loader, "workers", 0)
    rates = f"loader alone, {workers} workers a device: {_format(slowest)}; model alone: {1 / model:,.0f} samples/s"
    if not slowest.complete:
        means = f"perhaps loader-bound: no steady rate of the loader within {LIMIT_S:.0f} s"
        return [Finding(NAME, "note", rates, means, "compare with a cell of data: synthetic_device")]
    needed = math.ceil(max(1, workers) * loader / model)
    if needed <= slowest.processors:
        first = f"set loader.workers to {needed}, make samples cheaper"
    else:
        first = f"make samples cheaper ({needed} workers a device, for which it has {slowest.processors} processors)"
    means = "loader-bound: the measured throughput and scaling are those of the loader"
    return [Finding(NAME, "warning", rates, means, f"{first}, or measure with data: synthetic_device")]


def figures(seen: Sequence[Rate | None], case: Case) -> dict[str, str]:
    """Return the rates of the model and of the loader, by title."""
    rates_by_title = {"model alone": f"{case.cell.global_batch_size / _step_s(case):,.0f} samples/s"}
    if slowest := _slowest(seen):
        rates_by_title["loader alone"] = _format(slowest)
    return rates_by_title


def _slowest(seen: Sequence[Rate | None]) -> Rate | None:
    return max((rate for rate in seen if rate), key=lambda rate: rate.sample_s, default=None)


def _format(rate: Rate) -> str:
    return f"{'' if rate.complete else 'at least '}{1 / rate.sample_s:,.0f} samples/s"


def _step_s(case: Case) -> float:
    """Return the step time of the slowest rank, without the loader."""
    return max(rank.step_s for rank in case.steps)


def _redundant(findings: Sequence[Finding]) -> bool:
    """Return whether there is an error or a warning: the step time may then be that of a faulty model."""
    return any(finding.severity != "note" for finding in findings)


CHECK = Check(NAME, observe, judge, needs_steps=True, redundant=_redundant, figures=figures, about=("datasets",))


def observe_slow_rank(subject: Subject) -> float:
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


def judge_slow_rank(seen: Sequence[float], case: Case) -> list[Finding]:
    """Compare the fastest step of each rank alone."""
    slow = _slow(seen)
    if not slow:
        return []
    times = ", ".join(f"{1000 * seconds:.1f}" for seconds in seen)
    return [
        Finding(
            SLOW_RANK,
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


SLOW_RANK_CHECK = Check(
    SLOW_RANK,
    observe_slow_rank,
    judge_slow_rank,
    needs_peers=True,
    redundant=any_error,
    about=("loss", "forward"),
    clue=r"get_rank|RANK",
)
