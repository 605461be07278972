"""Throughput: warm-up until steps are steady, then timed windows of full batches."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.config.sections import Throughput
from harness.measure import load, phase_timers
from harness.measure.gpu_readings import summarise
from harness.measure.loss_scale import rounds_until_unskipped, scale_columns
from harness.measure.steady_state import is_steady
from harness.measure.stepper import Stepper, TimedWindow
from harness.measure.telemetry import open_telemetry
from harness.plan.planner import least_warmup_s
from harness.plan.rows import RankFacts, TrialFacts

PHASE_PART, LEAST_MARKED = 4, 3
"""A window that only marks phases has a timed window's steps divided by the first, and at least the second."""


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
    detailed = phase_timers.phases_are_cheap(ranks.devices[0], stepper.micro_batches, pace_s)
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
        self._load = load.read()
        self._gpus = self._telemetry.read() if self._telemetry else ()

    def columns(self, timed: Sequence[TimedWindow]) -> RankFacts:
        """Return the rank's columns over these windows."""
        gpus = self._telemetry.read() if self._telemetry else ()
        used = load.load_between(self._load, load.read())
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
