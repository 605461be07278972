"""Throughput: warm-up until steps are steady, then timed windows of full batches."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.sections import Throughput
from harness.measure import load, phase_timers
from harness.measure.gpu_readings import summarise
from harness.measure.steady_state import is_steady
from harness.measure.stepper import Stepper, TimedWindow
from harness.measure.telemetry import open_telemetry
from harness.plan.rows import RankFacts

PHASE_PART, LEAST_MARKED = 4, 3
"""A window that only marks phases has a timed window's steps divided by the first, and at least the second."""


@dataclass(frozen=True)
class ThroughputMeasurement:
    """One rank's windows, and the load around the timed ones.

    ``finite`` is False if the training diverged, ``steady`` if the warm-up reached its limit.
    """

    windows: tuple[TimedWindow, ...]
    window_steps: int
    finite: bool
    steady: bool
    load: RankFacts


def measure_throughput(stepper: Stepper, settings: Throughput, *, shared: bool = False) -> ThroughputMeasurement:
    """Take warm-up rounds, then timed windows; if marking phases costs time, one more window for the phases.

    ``shared``: whether ranks share GPUs. Raises WorkloadError.
    """
    ranks = stepper.ranks
    rounds, steady = _warm_up(stepper, settings)
    pace_s = _pace(rounds[-1].window.step_s)
    detailed = phase_timers.phases_are_cheap(ranks.devices[0], stepper.micro_batches, pace_s)
    steps, detailed = ranks.broadcast((window_length(settings, pace_s), detailed))
    monitor = LoadMonitor(stepper, shared)
    timed = [stepper.window("timed", steps, detailed=detailed) for _ in range(settings.windows)]
    used = monitor.columns(timed)
    finite = stepper.training.finite(list(timed[-1].window.losses))
    flags = ranks.sum([float(finite)])
    marked = () if detailed else (stepper.window("phases", max(LEAST_MARKED, -(-steps // PHASE_PART))),)
    return ThroughputMeasurement((*rounds, *timed, *marked), steps, flags[0] == ranks.world_size, steady, used)


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
    """Take rounds of warm-up steps until rank 0 finds them steady; return them, and whether it did in time."""
    rounds: list[TimedWindow] = []
    for _ in range(settings.warmup_rounds):
        rounds.append(stepper.window("warmup", settings.warmup_steps))
        steady = stepper.ranks.first and is_steady([window.window.step_s for window in rounds])
        if stepper.ranks.broadcast(steady):
            return rounds, True
    return rounds, False


def window_length(settings: Throughput, pace_s: float) -> int:
    """Return the steps of a window: at least ``window_steps``, and ``window_seconds`` at the warm-up's pace."""
    wanted = math.ceil(settings.window_seconds / pace_s) if pace_s > 0 else 0
    return max(settings.window_steps, wanted)


def _pace(step_s: Sequence[float]) -> float:
    """Return the seconds of a step: the median of the second half of the last warm-up round."""
    later = list(step_s)[len(step_s) // 2 :]
    return statistics.median(later) if later else 0.0
