"""A profile of a few steps after the windows of a script: seconds in which its ranks exchange, and its GPU is idle."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from harness.config.strategy_traits import COLLECTIVES
from harness.measure.profiles import (
    PROFILED_STEPS,
    CollectiveTime,
    Event,
    busy_s,
    collective_times,
    events_of,
    mark_step,
    marked_steps,
)

STEPS = 1 + PROFILED_STEPS
"""In the first one, which does not count, ranks wait for those that began late."""


@dataclass(frozen=True)
class ProfiledSteps:
    """Seconds a step of one rank, over PROFILED_STEPS steps.

    ``exchange_s``: in which collectives ran; ``exposed_s``: in which they ran and nothing was computed. ``idle_s``: in
    which the GPU ran no kernel; None on a CPU.
    """

    step_s: float
    wait_s: float
    exchange_s: float
    exposed_s: float
    idle_s: float | None


class StepProfiler:
    """Profiles STEPS steps of this thread. Steps of a script that has a profiler of its own are only counted."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._waits: list[float] = []
        self._paused = False
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if devices else [])]
        # torch has one profile a thread, and a second one ends the first, whose later calls then fail
        self._profiler = None if has_profiler() else profile(activities=activities, acc_events=True)
        if self._profiler:
            self._profiler.start()

    def step(self, wait_s: float, pause_s: float) -> bool:
        """Mark the end of a step, with its seconds of waiting for data and of pauses; return whether it is the last."""
        self._paused |= bool(self._waits) and pause_s > 0
        self._waits.append(wait_s)
        mark_step(self._devices if len(self._waits) in (1, STEPS) else ())
        return len(self._waits) >= STEPS

    def end(self) -> ProfiledSteps | None:
        """Return the seconds of the steps; None if they are not known: of steps with a pause, or without a profile."""
        try:
            if not self._profiler:
                return None
            self._profiler.stop()
            device = self._devices[0] if self._devices else torch.device("cpu")
            return None if self._paused else seconds_of(events_of(self._profiler), device, sum(self._waits[1:]))
        except Exception:  # of the profiler: the script is measured already
            return None


def has_profiler() -> bool:
    """Return whether the process holds a profiler of torch, running or not."""
    gc.collect()  # what nothing holds any more is none
    kinds = (torch.autograd.profiler.profile, torch.profiler.profile)
    return any(issubclass(type(each), kinds) for each in gc.get_objects())


def seconds_of(events: Sequence[Event], device: torch.device, wait_s: float) -> ProfiledSteps | None:
    """Return seconds a step between the first mark and the last; None without two of them, or if kernels are lost.

    ``wait_s``: that of all these steps.
    """
    (began, over), steps, inside = marked = marked_steps(events)
    if not steps or marked.lost:
        return None
    on_gpu = device.type == "cuda"
    if on_gpu and all(event.gpu is None for event in events):  # CUPTI is not permitted, or in use
        return None
    time = collective_times(inside, (COLLECTIVES,), device).get(COLLECTIVES.name, CollectiveTime(0.0, 0.0))
    step_s = (over - began) / 1e9 / steps
    idle_s = step_s - (busy_s(marked, [device]) or 0.0) if on_gpu else None
    return ProfiledSteps(step_s, wait_s / steps, time.total_s / steps, time.exposed_s / steps, idle_s)
