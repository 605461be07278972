"""How fast a training steps: warm-up until it is steady, then timed windows of full batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config_sections import Throughput
from harness.measure import load, marks
from harness.measure.stepper import Stepper, Stretch
from harness.stats import is_steady


@dataclass(frozen=True)
class Speed:
    """One rank's windows, and what was seen around the timed ones.

    ``finite`` is False where the training diverged, ``steady`` where the warm-up came to its limit. ``phases``:
    whether the timed windows hold the phases of their steps.
    """

    stretches: tuple[Stretch, ...]
    finite: bool
    steady: bool
    phases: bool
    load: Mapping[str, Any]

    @property
    def window_steps(self) -> int:
        """Steps of a timed window."""
        return self.stretches[-1].window.steps


def measure_throughput(stepper: Stepper, settings: Throughput) -> Speed:
    """Warm-up rounds, then windows. Raises WorkloadError."""
    ranks = stepper.ranks
    rounds, steady = _warm_up(stepper, settings)
    pace_s = _pace(rounds[-1].window.step_s)
    detailed = marks.cost_s(ranks.devices[0]) <= marks.DEAR * pace_s and ranks.devices[0].type != "cuda"
    steps, detailed = ranks.broadcast((window_length(settings, pace_s), detailed))
    before = load.read()
    timed = [stepper.window("timed", steps, detailed=detailed) for _ in range(settings.windows)]
    used = load.between(before, load.read())
    finite = stepper.training.finite(list(timed[-1].window.losses))
    flags = ranks.sum([float(finite)])
    return Speed((*rounds, *timed), flags[0] == ranks.world_size, steady, detailed, used)


def _warm_up(stepper: Stepper, settings: Throughput) -> tuple[list[Stretch], bool]:
    """Rounds of warm-up steps until rank 0 finds them steady, or there were ``warmup_rounds``."""
    rounds: list[Stretch] = []
    for _ in range(settings.warmup_rounds):
        rounds.append(stepper.window("warmup", settings.warmup_steps))
        if stepper.ranks.broadcast(is_steady([stretch.window.step_s for stretch in rounds])):
            return rounds, True
    return rounds, False


def window_length(settings: Throughput, pace_s: float) -> int:
    """Steps a window takes: at least so many, and as many as fill its least seconds at the warm-up's pace."""
    wanted = math.ceil(settings.window_seconds / pace_s) if pace_s > 0 else 0
    return max(settings.window_steps, wanted)


def _pace(step_s: Sequence[float]) -> float:
    """Seconds of a step: the median of the second half of the last warm-up round."""
    later = list(step_s)[len(step_s) // 2 :]
    return statistics.median(later) if later else 0.0
