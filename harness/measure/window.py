"""A timed stretch of steps between two device syncs. Nothing observes inside it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

Clock = Callable[[], float]
Step = Callable[[Any], tuple[Tensor, Any]]
"""One optimizer step on a batch: (sum of the losses, weight), both detached and unread."""


class Marks(Protocol):
    """The ends of steps, written down without waiting and read after the window."""

    def mark(self) -> None: ...

    def intervals(self) -> list[float]:
        """Seconds between consecutive marks; may wait for the device."""
        ...


class HostMarks:
    """Marks by the host's clock: right where the host itself computes."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(self._clock())

    def intervals(self) -> list[float]:
        return [end - start for start, end in pairwise(self._times)]


class CudaMarks:
    """Marks by events on the device's current stream, made beforehand."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._next = 0

    def mark(self) -> None:
        self._events[self._next].record(self._stream)
        self._next += 1

    def intervals(self) -> list[float]:
        used = self._events[: self._next]
        if used:
            used[-1].synchronize()
        return [start.elapsed_time(end) / 1000.0 for start, end in pairwise(used)]


@dataclass(frozen=True)
class Window:
    """What one rank saw: its whole time, each step's time and the part of it that waited for data (seconds).

    ``losses`` and ``weights`` are still on the device, one entry a step.
    """

    duration_s: float
    step_s: Sequence[float]
    wait_s: Sequence[float]
    losses: Sequence[Tensor]
    weights: Sequence[Any]

    @property
    def steps(self) -> int:
        return len(self.step_s)


def marks_for(devices: Sequence[torch.device], steps: int) -> Marks:
    """The marks that suit the first device."""
    return CudaMarks(devices[0], steps + 1) if devices[0].type == "cuda" else HostMarks()


def synchronize(devices: Sequence[torch.device]) -> None:
    """Waits until every device has done what it was asked; a CPU has, when the call returned."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def measure_window(
    step: Step,
    batches: Iterator[Any],
    *,
    steps: int,
    marks: Marks,
    synchronize: Callable[[], None],
    advance: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> Window:
    """Takes ``steps`` steps. ``advance`` is called once a step and must not wait."""
    waits, losses, weights = [], [], []
    with no_garbage_collection():
        synchronize()
        start = clock()
        marks.mark()
        for _ in range(steps):
            asked = clock()
            batch = next(batches)
            waits.append(clock() - asked)
            loss, weight = step(batch)
            losses.append(loss)
            weights.append(weight)
            marks.mark()
            advance()
        synchronize()
        duration = clock() - start
    return Window(duration, marks.intervals(), waits, losses, weights)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector does not run inside; it is as it was afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
