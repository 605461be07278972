"""Throughput: warm-up until steps are steady, then timed windows of full batches, and the load around them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import psutil

from harness.config.sections import Throughput
from harness.measure.stepper import Stepper, rounds_until_unskipped, scale_columns
from harness.measure.telemetry import open_telemetry, summarise
from harness.measure.window import Window, phases_are_cheap
from harness.plan.planner import least_warmup_s
from harness.plan.rows import STEADY_CHANGE, STEADY_NOISE, RankFacts, TrialFacts
from harness.train.ranks import Ranks

TREND_NOISE = 3.2
"""Bound of 95 % of trends by noise alone, in notches: 1.96 sqrt(12 / n) sigma, with sigma = IQR / 1.349."""
STEADY_STEPS = 500
"""Longer rounds are thinned to about this number of steps: the trend takes all pairs of them."""
PHASE_PART, LEAST_MARKED = 4, 3
"""A window that only marks phases has a timed window's steps divided by the first, and at least the second."""


def read() -> dict[str, float]:
    """Return counters by the column of their differences: the clock's, CPU time of this process with its children and
    of the node, swap of the node; takes about a millisecond.
    """
    now, own_cpu_s, me = time.perf_counter(), 0.0, psutil.Process()
    for process in (me, *me.children(recursive=True)):  # loader workers work for us
        with suppress(psutil.Error):
            times = process.cpu_times()
            # with those of its children that have ended, as loader workers do at the end of an epoch
            own_cpu_s += sum(
                getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system")
            )
    node, swap = psutil.cpu_times(), psutil.swap_memory()
    node_cpu_s = sum(getattr(node, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    swapped_bytes = int(swap.sin + swap.sout)
    return {"watched_s": now, "own_cpu_s": own_cpu_s, "node_cpu_s": node_cpu_s, "swapped_bytes": swapped_bytes}


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

    windows: tuple[Window, ...]
    window_steps: int
    finite: bool
    steady: bool
    load: RankFacts
    facts: TrialFacts = field(default_factory=TrialFacts)


def measure_throughput(
    stepper: Stepper, settings: Throughput, *, shared: bool = False, between: Callable[[], None] | None = None
) -> ThroughputMeasurement:
    """Take warm-up rounds, then timed windows; if marking phases costs time, one more window for the phases.

    ``shared``: whether ranks share GPUs. ``between``: called before and after every timed window, and no part of the
    observed load. Raises WorkloadError.
    """
    ranks = stepper.ranks
    rounds, warm_up = _warm_up(stepper, settings)
    rounds += rounds_until_unskipped(stepper, settings.warmup_steps, sum(each.steps for each in rounds))
    pace_s = warm_up.pace_s
    detailed = phases_are_cheap(ranks.devices[0], stepper.micro_batches, pace_s)
    steps, detailed = ranks.broadcast((window_length(settings, pace_s), detailed))
    scale = stepper.training.loss_scale()
    monitor = LoadMonitor(ranks, shared)
    timed: list[Window] = []
    while len(timed) < settings.windows:
        if between:
            monitor.leave_out(between)
        timed.append(stepper.window("timed", steps, detailed=detailed))
    if between:
        monitor.leave_out(between)
    used = monitor.columns(sum(window.weight for window in timed))
    facts = scale_columns(scale, stepper.training.loss_scale(), steps * settings.windows)
    finite = all(ranks.gather(stepper.training.finite(timed[-1].values["loss"])))
    marked = () if detailed else (stepper.window("phases", max(LEAST_MARKED, -(-steps // PHASE_PART))),)
    return ThroughputMeasurement((*rounds, *timed, *marked), steps, finite, warm_up.steady, used, facts)


class LoadMonitor:
    """Load of a rank's node and GPUs from ``begin`` to ``columns``; never read inside a window.

    ``own_pids``: the rank's processes, beside its loader workers.
    """

    def __init__(self, ranks: Ranks, shared: bool, own_pids: Sequence[int] = ()) -> None:
        self._shared = shared
        pids = [pid for of_rank in ranks.gather([os.getpid(), *own_pids]) for pid in of_rank]
        self._telemetry = open_telemetry(ranks.devices, own_pids=pids)
        self.begin()

    def begin(self) -> None:
        """Observe from now on."""
        self._load = read()
        self._gpus = self._telemetry.read() if self._telemetry else ()

    def leave_out(self, call: Callable[[], None]) -> None:
        """Call something whose load on the node is not to be observed."""
        before = read()
        call()
        after = read()
        self._load = {name: value + after[name] - before[name] for name, value in self._load.items()}

    def columns(self, samples: float) -> RankFacts:
        """Return the rank's columns; ``samples``: those that it has trained on since ``begin``."""
        gpus = self._telemetry.read() if self._telemetry else ()
        used = cast(RankFacts, {name: now - self._load[name] for name, now in read().items()})
        if self._telemetry:
            used |= summarise(self._gpus, gpus, seconds=used["watched_s"], shared=self._shared, samples=samples)
            self._telemetry.close()
        return used


class WarmUp:
    """The rounds of a warm-up, which is over once they are steady, or at their limit.

    The second round lasts the least seconds, which do not count the first: that may be compilation. ``steps``: of the
    next round.
    """

    def __init__(self, settings: Throughput, device: str) -> None:
        self._settings, self._left_s = settings, least_warmup_s(settings, device)
        self._rounds: list[Sequence[float]] = []
        self._used = 0
        self.steps = settings.warmup_steps
        self.steady = self.over = False

    @property
    def pace_s(self) -> float:
        """Seconds of a step in the last round."""
        return pace(self._rounds[-1])

    def add(self, step_s: Sequence[float], duration_s: float) -> None:
        """Add a round of steps."""
        self._rounds.append(step_s)
        self._left_s -= duration_s if len(self._rounds) > 1 else 0.0
        self.steady = is_steady(self._rounds)
        self.over = self._left_s <= 0 and (self.steady or len(self._rounds) >= self._settings.warmup_rounds)
        self.steps = max(self._settings.warmup_steps, _steps_in(self._left_s, self.pace_s))

    def is_over(self, step_s: Sequence[float]) -> bool:
        """Add the rounds that these steps complete, all steps so far; return whether the warm-up is over."""
        while not self.over and len(step_s) - self._used >= self.steps:
            part = step_s[self._used : self._used + self.steps]
            self._used += self.steps
            self.add(part, sum(part))
        return self.over


def _warm_up(stepper: Stepper, settings: Throughput) -> tuple[list[Window], WarmUp]:
    """Take rounds of warm-up steps until rank 0 finds them steady; return them."""
    ranks, rounds = stepper.ranks, list[Window]()
    warm_up = WarmUp(settings, ranks.devices[0].type)
    while not warm_up.over:
        rounds.append(stepper.window("warmup", warm_up.steps))
        warm_up.add(rounds[-1].step_s, rounds[-1].duration_s)
        decided = ranks.broadcast((warm_up.over, warm_up.steady, warm_up.steps))
        warm_up.over, warm_up.steady, warm_up.steps = decided
    return rounds, warm_up


def window_length(settings: Throughput, pace_s: float) -> int:
    """Return the steps of a window: at least ``window_steps``, and ``window_seconds`` at the warm-up's pace."""
    return max(settings.window_steps, _steps_in(settings.window_seconds, pace_s))


def _steps_in(seconds: float, pace_s: float) -> int:
    """Return the steps that take these seconds at this pace; 0 if no time passes."""
    return math.ceil(max(0.0, seconds) / pace_s) if pace_s > 0 else 0


def pace(step_s: Sequence[float]) -> float:
    """Return the seconds of a step: the mean of the second half of a warm-up round.

    Not the median: several loader workers deliver in bursts, between which most steps wait for nothing.
    """
    return statistics.fmean(step_s[len(step_s) // 2 :])
