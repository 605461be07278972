"""A timed window: steps between two device syncs, and the timers of its phases.

Inside it only the time of points of a step is read, and of phases only if that costs less than MAX_OVERHEAD of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.plan.rows import WindowKind
from harness.system.process import no_garbage_collection
from harness.train.training import COPIED, FETCHED, NEXT, START, STEP, Mark, Phase, StepValues

HOST = ("wait", "copy", "rest", "forward", "backward", "optimizer", "rest")
"""The phase between each point of a step and the next, on the host's clock."""
DEVICE = ("idle", "copy", "rest", "forward", "backward", "optimizer", "rest")
"""The phases on a GPU's stream: while the host waits for data and before the copy arrives, the stream is idle."""
WAIT = ("wait", "rest")
"""The phases of a micro-batch if only its wait is marked."""
MAX_OVERHEAD = 0.0002
"""Largest part of a step that ``cost_s`` may be; beyond it the phases have windows of their own.

Far below the harness's limit of 1 % of a step: among a step's kernels, where caches are cold, marks cost several
times as much as in the loop that measures them (0.7 us there, about 3 us in a step of 0.3 ms).
"""
MOST_KEPT = 1000
"""Steps whose values may be tensors of their own: CUDA's allocator gives each of them 512 bytes."""
Clock = Callable[[], float]
Step = Callable[[object, Mark], StepValues]
"""One optimizer step on a batch, marking its phases; its values are unread.

With accumulation the batch is an iterator over its micro-batches.
"""
Copy = Callable[[object], object]


class StepTimings(NamedTuple):
    """Seconds of each step, of each step's wait, and of the whole window by phase (empty if not marked)."""

    step_s: Sequence[float]
    wait_s: Sequence[float]
    phases: Mapping[str, float]
    host_phases: Mapping[str, float]


class HostTimer:
    """Timer on the host's clock, correct if the host itself computes. With ``detailed`` False it has no phases.

    ``mark(point)`` records that a step has passed a point; ``read`` returns the timings, and may wait for the device.
    ``beside``: whether a GPU computes, whose own phases are then unknown.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        detailed: bool = True,
        micro_batches: int = 1,
        beside: bool = False,
    ) -> None:
        self._detailed, self._beside = detailed, beside
        self._names = _repeated(HOST, micro_batches) if detailed else micro_batches * WAIT
        self._times: list[float] = []
        self.mark = (_every_point if detailed else _step_and_wait)(self._times, clock)

    def read(self) -> StepTimings:
        gaps = np.diff(np.asarray(self._times, dtype=np.float64)).reshape(-1, len(self._names))
        waits = gaps[:, [name == "wait" for name in self._names]]
        phases = _by_phase(self._names, gaps) if self._detailed else {}
        of_device, of_host = ({}, phases) if self._beside else (phases, {})
        return StepTimings(gaps.sum(axis=1).tolist(), waits.sum(axis=1).tolist(), of_device, of_host)


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
        self._host = HostTimer(micro_batches=micro_batches, beside=True)

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
        phases = _by_phase(self._names, gaps) if self._detailed else {}
        return self._host.read()._replace(step_s=gaps.sum(axis=1).tolist(), phases=phases)


Marks = HostTimer | CudaTimer


def marks_for(devices: Sequence[torch.device], steps: int, *, detailed: bool = True, micro_batches: int = 1) -> Marks:
    """Return the timer for the kind of the first device."""
    if devices[0].type == "cuda":
        return CudaTimer(devices[0], steps, detailed=detailed, micro_batches=micro_batches)
    return HostTimer(detailed=detailed, micro_batches=micro_batches)


def phases_are_cheap(device: torch.device, micro_batches: int, step_s: float) -> bool:
    """Return whether steps of ``step_s`` mark their phases in the timed windows themselves; on a GPU never."""
    return device.type != "cuda" and cost_s(device) * micro_batches <= MAX_OVERHEAD * step_s


@cache
def cost_s(device: torch.device) -> float:
    """Return the seconds that marking the phases of one step costs, beyond marking its start and its wait."""
    count = 700
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


def _by_phase(names: Sequence[str], gaps: np.ndarray) -> dict[str, float]:
    sums = gaps.sum(axis=0)
    return {
        name: float(sum(sums[i] for i, other in enumerate(names) if other == name)) for name in dict.fromkeys(names)
    }


@dataclass(frozen=True)
class Window:
    """One rank's window: its duration, each step's time and the part of it that waited for data, in seconds.

    ``phases``: seconds of the whole window by phase, on the host's clock on a CPU, on the stream's on a GPU, where
    ``host_phases`` has the host's; empty if they were not marked. ``weight``: samples or tokens that the rank trained
    on in it. ``values``: what the steps report, by name, with one entry a step; empty of a script's.
    """

    kind: WindowKind
    duration_s: float
    step_s: Sequence[float]
    wait_s: Sequence[float]
    phases: Mapping[str, float]
    host_phases: Mapping[str, float]
    weight: float = 0.0
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    thread_cpu_s: float = 0.0
    """CPU time of the thread that trains."""
    process_cpu_s: float = 0.0
    late_s: float = 0.0
    """Of a window without exchange: waiting for later ranks in collectives of the user's own code."""

    @property
    def steps(self) -> int:
        return len(self.step_s)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every device has finished its work; a CPU has none left when a call returns."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextmanager
def timed_part(parts: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add a block's seconds on the host's clock to those of a part."""
    start = time.perf_counter()
    try:
        yield
    finally:
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - start


def elapsed_s(call: Callable[[], object], devices: Sequence[torch.device], clock: Clock = time.perf_counter) -> float:
    """Return the seconds of a call, with the work that it gives to the devices."""
    synchronize(devices)
    start = clock()
    call()
    synchronize(devices)
    return clock() - start


def measure_window(
    step: Step,
    fetch: Iterator[object],
    *,
    copy: Copy,
    steps: int,
    marks: Marks,
    synchronize: Callable[[], None],
    advance: Callable[[], None],
    clock: Clock = time.perf_counter,
    micro_batches: int = 1,
    kind: WindowKind = "timed",
) -> Window:
    """Take ``steps`` steps on batches that are fetched and copied. ``advance``, once a step, never waits."""
    taken: list[StepValues] = []
    kept: list[list[Tensor | float]] = [[] for _ in StepValues._fields]
    if micro_batches > 1:
        step, copy = _accumulating(step, fetch, copy, micro_batches)
    mark = marks.mark
    with no_garbage_collection():
        synchronize()
        thread_s, process_s = time.thread_time(), time.process_time()
        start = clock()
        for number in range(steps):
            if number % MOST_KEPT == MOST_KEPT - 1 and taken[0][0].device.type != "cpu":
                kept, taken = _joined(kept, taken), []
            mark(START)
            batch = next(fetch)
            mark(FETCHED)
            batch = copy(batch)
            mark(COPIED)
            taken.append(step(batch, mark))
            advance()
        mark(START)
        synchronize()
        duration = clock() - start
        thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
    read = marks.read()
    values = dict(zip(StepValues._fields, map(_read, _joined(kept, taken)), strict=True))
    return Window(kind, duration, *read, sum(values["weight"]), values, thread_s, process_s)


def _joined(kept: Sequence[list[Tensor | float]], taken: Sequence[StepValues]) -> list[list[Tensor | float]]:
    """Return the values of each name, those of the steps ``taken`` after those ``kept``.

    In one tensor on their device, where the host waits for nothing: as tensors of their own they would count as memory
    of the training. As they are if some are numbers.
    """
    joined: list[list[Tensor | float]] = []
    for place, before in enumerate(kept):
        values = [*before, *(each[place] for each in taken)]
        tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
        joined.append([torch.cat(tensors)] if tensors and len(tensors) == len(values) else values)
    return joined


def _read(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values of a window's steps, in one copy if they are in one tensor."""
    parts = (value.reshape(-1).tolist() if isinstance(value, Tensor) else [value] for value in values)
    return [float(value) for part in parts for value in part]


def _accumulating(step: Step, fetch: Iterator[object], copy: Copy, count: int) -> tuple[Step, Copy]:
    """Return step and copy of a window whose steps take ``count`` micro-batches, none of which is kept here."""

    box: list[object] = []

    def boxed(batch: object) -> object:
        box.append(copy(batch))
        return box

    def accumulate(_: object, mark: Mark) -> StepValues:
        return step(_micro_batches(box, fetch, copy, mark, count), mark)

    return accumulate, boxed


def _micro_batches(box: list[object], fetch: Iterator[object], copy: Copy, mark: Mark, count: int) -> Iterator[object]:
    """Yield the micro-batch in the box and further ones, each fetched when it is asked for, as the device computes."""
    yield box.pop()
    for _ in range(count - 1):
        mark(NEXT)
        batch = next(fetch)
        mark(FETCHED)
        batch = copy(batch)
        mark(COPIED)
        yield batch
