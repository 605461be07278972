"""Timers of a step's phases: points are recorded without a sync, and read after the window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from harness.train.phases import COPIED, START, STEP, Mark, Phase

HOST = ("wait", "copy", "rest", "forward", "backward", "optimizer", "rest")
"""The phase between each point of a step and the next, on the host's clock."""
DEVICE = ("idle", "copy", "rest", "forward", "backward", "optimizer", "rest")
"""The same on a GPU's stream: while the host waits for data and before the copy arrives, the stream is idle."""
WAIT = ("wait", "rest")
"""The same for a micro-batch if only its wait is marked."""
PHASES = ("wait", "idle", "copy", "forward", "backward", "optimizer", "rest")
MAX_OVERHEAD = 0.0002
"""Largest part of a step that ``cost_s`` may be; beyond it the phases have windows of their own.

Far below the harness's limit of 1 % of a step: among a step's kernels, where caches are cold, marks cost several
times as much as in the loop that measures them (0.7 us there, about 3 us in a step of 0.3 ms).
"""


@dataclass(frozen=True)
class StepTimings:
    """Seconds of each step, of each step's wait, and of the whole window by phase (empty if not marked)."""

    step_s: Sequence[float]
    wait_s: Sequence[float]
    phases: Mapping[str, float]
    host_phases: Mapping[str, float]


class Marks(Protocol):
    """``mark(point)`` records that a step has passed a point."""

    @property
    def mark(self) -> Mark: ...

    def read(self) -> StepTimings:
        """Return the timings; may wait for the device."""
        ...


class HostTimer:
    """Timer on the host's clock, correct if the host itself computes. With ``detailed`` False it has no phases."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, detailed: bool = True, micro_batches: int = 1
    ) -> None:
        self._detailed = detailed
        self._names = _repeated(HOST, micro_batches) if detailed else micro_batches * WAIT
        self._times: list[float] = []
        self.mark = (_every_point if detailed else _step_and_wait)(self._times, clock)

    def read(self) -> StepTimings:
        gaps = _gaps(self._times, len(self._names))
        waits = gaps[:, [name == "wait" for name in self._names]]
        phases = _by_phase(self._names, gaps) if self._detailed else {}
        return StepTimings(gaps.sum(axis=1).tolist(), waits.sum(axis=1).tolist(), phases, {})


def _every_point(times: list[float], clock: Callable[[], float]) -> Mark:
    """Return a mark that keeps every point. A function, as each lookup of a method costs when caches are cold."""
    append = times.append

    def mark(point: Phase) -> None:
        append(clock())

    return mark


def _step_and_wait(times: list[float], clock: Callable[[], float]) -> Mark:
    """Return a mark that keeps START, NEXT and FETCHED only."""
    append, limit = times.append, COPIED

    def mark(point: Phase) -> None:
        if point < limit:
            append(clock())

    return mark


class CudaTimer:
    """Timer by events on the device's stream, one a step or with ``detailed`` one a phase, and by the host's clock."""

    def __init__(self, device: torch.device, steps: int, *, detailed: bool, micro_batches: int = 1) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._detailed = detailed
        self._names = _repeated(DEVICE, micro_batches) if detailed else DEVICE[:1]
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(steps * len(self._names) + 1)]
        for event in self._events:
            event.record(self._stream)  # torch creates an event when it is first recorded: not in the window
        self._next = 0
        self._host = HostTimer(micro_batches=micro_batches)

    def mark(self, point: Phase) -> None:
        if self._detailed or point is START:
            self._events[self._next].record(self._stream)
            self._next += 1
        self._host.mark(point)

    def read(self) -> StepTimings:
        self._events[self._next - 1].synchronize()
        used = self._events[: self._next]
        # from event to event: from the first event, float32 milliseconds lose microseconds after a minute
        between = [start.elapsed_time(end) / 1000.0 for start, end in pairwise(used)]
        gaps = np.asarray(between, dtype=np.float64).reshape(-1, len(self._names))
        host = self._host.read()
        phases = _by_phase(self._names, gaps) if self._detailed else {}
        return StepTimings(gaps.sum(axis=1).tolist(), host.wait_s, phases, host.phases)


class BesideDevice:
    """Timer by the host's clock beside a GPU: for windows of more steps than there should be events of in memory."""

    def __init__(self, micro_batches: int = 1) -> None:
        self._host = HostTimer(micro_batches=micro_batches)
        self.mark = self._host.mark

    def read(self) -> StepTimings:
        host = self._host.read()
        return StepTimings(host.step_s, host.wait_s, {}, host.phases)


def epoch_marks(devices: Sequence[torch.device], micro_batches: int) -> Marks:
    """Return the timer of a whole epoch: no events on a GPU, whose phases are then unknown and the host's known."""
    return (BesideDevice if devices[0].type == "cuda" else HostTimer)(micro_batches=micro_batches)


def marks_for(devices: Sequence[torch.device], steps: int, *, detailed: bool = True, micro_batches: int = 1) -> Marks:
    """Return the timer for the kind of the first device."""
    if devices[0].type == "cuda":
        return CudaTimer(devices[0], steps, detailed=detailed, micro_batches=micro_batches)
    return HostTimer(detailed=detailed, micro_batches=micro_batches)


def phases_are_cheap(device: torch.device, micro_batches: int, step_s: float) -> bool:
    """Return whether steps of ``step_s`` mark their phases in the timed windows themselves; on a GPU never."""
    return device.type != "cuda" and cost_s(device) * micro_batches <= MAX_OVERHEAD * step_s


@cache
def cost_s(device: torch.device, count: int = 700) -> float:
    """Return the seconds that marking the phases of one step costs, beyond marking its start and its wait."""
    marks = marks_for((device,), count // len(STEP))
    start = time.perf_counter()
    for _ in range(count // len(STEP)):
        for point in STEP:
            marks.mark(point)
    per_mark = (time.perf_counter() - start) / count
    return per_mark * (len(STEP) - 2)


def _repeated(names: Sequence[str], micro_batches: int) -> tuple[str, ...]:
    """Return the phases between the points of a step with several forward and backward passes."""
    last = names.index("backward") + 1
    further = (*names[:2], *names[names.index("forward") : last])
    return (*names[:last], *((micro_batches - 1) * further), *names[last:])


def _gaps(times: Sequence[float], per_step: int) -> np.ndarray:
    """Return the seconds from each mark to the next, shape (steps, marks per step)."""
    return np.diff(np.asarray(times, dtype=np.float64)).reshape(-1, per_step)


def _by_phase(names: Sequence[str], gaps: np.ndarray) -> dict[str, float]:
    sums = gaps.sum(axis=0)
    return {
        name: float(sum(sums[i] for i, other in enumerate(names) if other == name)) for name in dict.fromkeys(names)
    }
