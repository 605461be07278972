"""Throughput: warm-up until steps are steady, then timed windows of full batches, and the load around them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import psutil

from harness.config.sections import Throughput
from harness.measure.losses import rounds_until_unskipped, scale_columns
from harness.measure.stepper import Stepper, TimedWindow
from harness.measure.telemetry import open_telemetry, summarise
from harness.measure.window import phases_are_cheap
from harness.plan.planner import least_warmup_s
from harness.plan.rows import STEADY_CHANGE, STEADY_NOISE, RankFacts, TrialFacts

TREND_NOISE = 3.2
"""Bound of 95 % of trends by noise alone, in notches: 1.96 sqrt(12 / n) sigma, with sigma = IQR / 1.349."""
STEADY_STEPS = 500
"""Longer rounds are thinned to about this number of steps: the trend takes all pairs of them."""
PHASE_PART, LEAST_MARKED = 4, 3
"""A window that only marks phases has a timed window's steps divided by the first, and at least the second."""


@dataclass(frozen=True)
class Load:
    """One instant on one rank: seconds of CPU time used by this process with its children, and by the node."""

    clock_s: float
    own_cpu_s: float
    node_cpu_s: float
    swapped_bytes: int


def read() -> Load:
    """Return the counters of node and process now; takes about a millisecond."""
    now, own_cpu_s, me = time.perf_counter(), 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):  # loader workers work for us
        with suppress(psutil.Error):
            times = process.cpu_times()
            own_cpu_s += times.user + times.system
    node, swap = psutil.cpu_times(), psutil.swap_memory()
    node_cpu_s = sum(getattr(node, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return Load(now, own_cpu_s, float(node_cpu_s), int(swap.sin + swap.sout))


def load_between(before: Load, after: Load) -> RankFacts:
    """Return a rank's columns: the time between two readings, and the CPU time and swap used in it."""
    return {
        "watched_s": after.clock_s - before.clock_s,
        "own_cpu_s": after.own_cpu_s - before.own_cpu_s,
        "node_cpu_s": after.node_cpu_s - before.node_cpu_s,
        "swapped_bytes": after.swapped_bytes - before.swapped_bytes,
    }


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


@dataclass(frozen=True)
class ThroughputMeasurement:
    """One rank's windows, and the load around the timed ones.

    ``finite`` is False if the training diverged, ``steady`` if the warm-up reached its limit. ``facts``: the loss
    scale of fp16, and the updates that it skipped.
    """

    windows: tuple[TimedWindow, ...]
    window_steps: int
    finite: bool
    steady: bool
    load: RankFacts
    facts: TrialFacts = field(default_factory=TrialFacts)


def measure_throughput(stepper: Stepper, settings: Throughput, *, shared: bool = False) -> ThroughputMeasurement:
    """Take warm-up rounds, then timed windows; if marking phases costs time, one more window for the phases.

    ``shared``: whether ranks share GPUs. Raises WorkloadError.
    """
    ranks = stepper.ranks
    rounds, steady = _warm_up(stepper, settings)
    rounds += rounds_until_unskipped(stepper, settings.warmup_steps, sum(each.window.steps for each in rounds))
    pace_s = _pace(rounds[-1].window.step_s)
    detailed = phases_are_cheap(ranks.devices[0], stepper.micro_batches, pace_s)
    steps, detailed = ranks.broadcast((window_length(settings, pace_s), detailed))
    scale = stepper.training.loss_scale()
    monitor = LoadMonitor(stepper, shared)
    timed = [stepper.window("timed", steps, detailed=detailed) for _ in range(settings.windows)]
    used = monitor.columns(timed)
    facts = scale_columns(scale, stepper.training.loss_scale(), steps * settings.windows)
    finite = stepper.training.finite(timed[-1].window.losses)
    flags = ranks.sum([float(finite)])
    marked = () if detailed else (stepper.window("phases", max(LEAST_MARKED, -(-steps // PHASE_PART))),)
    return ThroughputMeasurement((*rounds, *timed, *marked), steps, flags[0] == ranks.world_size, steady, used, facts)


class LoadMonitor:
    """Load of a rank's node and GPUs from its construction to ``columns``; never read inside a window."""

    def __init__(self, stepper: Stepper, shared: bool) -> None:
        ranks = stepper.ranks
        self._shared = shared
        self._telemetry = open_telemetry(ranks.devices, own_pids=tuple(ranks.gather(os.getpid())))
        self._load = read()
        self._gpus = self._telemetry.read() if self._telemetry else ()

    def columns(self, timed: Sequence[TimedWindow]) -> RankFacts:
        """Return the rank's columns over these windows."""
        gpus = self._telemetry.read() if self._telemetry else ()
        used = load_between(self._load, read())
        if self._telemetry:
            samples = sum(window.weight for window in timed)
            used |= summarise(self._gpus, gpus, seconds=used["watched_s"], shared=self._shared, samples=samples)
            self._telemetry.close()
        return used


def _warm_up(stepper: Stepper, settings: Throughput) -> tuple[list[TimedWindow], bool]:
    """Take rounds of warm-up steps until rank 0 finds them steady; return them, and whether it did in time.

    The second round lasts the least seconds, which do not count the first: that may be compilation.
    """
    ranks, rounds = stepper.ranks, list[TimedWindow]()
    steps, left_s = settings.warmup_steps, least_warmup_s(settings, ranks.devices[0].type)
    while True:
        rounds.append(stepper.window("warmup", steps))
        window = rounds[-1].window
        left_s -= window.duration_s if len(rounds) > 1 else 0.0
        steady = ranks.first and is_steady([each.window.step_s for each in rounds])
        ready = left_s <= 0 and (steady or len(rounds) >= settings.warmup_rounds)
        steps = max(settings.warmup_steps, _steps_in(left_s, _pace(window.step_s)))
        ready, steady, steps = ranks.broadcast((ready, steady, steps))
        if ready:
            return rounds, steady


def window_length(settings: Throughput, pace_s: float) -> int:
    """Return the steps of a window: at least ``window_steps``, and ``window_seconds`` at the warm-up's pace."""
    return max(settings.window_steps, _steps_in(settings.window_seconds, pace_s))


def _steps_in(seconds: float, pace_s: float) -> int:
    """Return the steps that take these seconds at this pace; 0 if no time passes."""
    return math.ceil(max(0.0, seconds) / pace_s) if pace_s > 0 else 0


def _pace(step_s: Sequence[float]) -> float:
    """Return the seconds of a step: the mean of the second half of the last warm-up round.

    Not the median: several loader workers deliver in bursts, between which most steps wait for nothing.
    """
    later = list(step_s)[len(step_s) // 2 :]
    return statistics.fmean(later) if later else 0.0
