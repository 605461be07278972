"""A profile of a few steps after the windows of a script: seconds in which its ranks exchange, and its GPU is idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.config.strategy_traits import COLLECTIVES
from harness.measure.profiles import PROFILED_STEPS, Event, collective_times, events_of, minus, union

MARK = "harness: end of a step"
"""The range that marks the end of a step. The first is that of a step in which ranks wait for those that began late."""
STEPS = 1 + PROFILED_STEPS


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
    """Profiles STEPS steps of this thread; torch ends a profile of the script's own."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._waits: list[float] = []
        self._pauses: list[float] = []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if devices else [])], acc_events=True
        )
        self._profiler.start()

    def step(self, wait_s: float, pause_s: float) -> bool:
        """Mark the end of a step, with its seconds of waiting for data and of pauses; return whether it is the last."""
        self._waits.append(wait_s)
        self._pauses.append(pause_s)
        if len(self._waits) in (1, STEPS):  # nothing of another step runs on a GPU between both marks
            for device in self._devices:
                torch.cuda.synchronize(device)
        with record_function(MARK):
            pass
        return len(self._waits) == STEPS

    def end(self) -> ProfiledSteps | None:
        """Return the seconds of the steps; None if the profile was ended, as by one of the script's own."""
        self._profiler.stop()
        device = self._devices[0] if self._devices else torch.device("cpu")
        return seconds_of(events_of(self._profiler), device, sum(self._waits[1:]), sum(self._pauses[1:]))


def seconds_of(
    events: Sequence[Event], device: torch.device, wait_s: float, pause_s: float = 0.0
) -> ProfiledSteps | None:
    """Return seconds a step between the first mark and the last; None if there are not two.

    ``wait_s``, ``pause_s``: those of all these steps.
    """
    marks = sorted(event.span for event in events if event.name == MARK and event.gpu is None)
    if len(marks) < 2:
        return None
    whole = (marks[0][1], marks[-1][0])
    inside = [event for event in events if whole[0] <= event.span[0] and event.span[1] <= whole[1]]
    time = collective_times(inside, (COLLECTIVES,), device)[COLLECTIVES.name]
    steps, idle_s = len(marks) - 1, None
    if device.type == "cuda":
        busy = union(each.span for each in inside if each.gpu == (device.index or 0) and not each.annotation)
        idle_s = sum(end - start for start, end in minus([whole], busy)) / 1e9 / steps
    return ProfiledSteps(
        ((whole[1] - whole[0]) / 1e9 - pause_s) / steps,
        wait_s / steps,
        time.total_s / steps if time else 0.0,
        time.exposed_s / steps if time else 0.0,
        idle_s,
    )
