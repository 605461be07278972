"""A timed window: steps between two device syncs, without any observer inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.measure.phase_timers import Marks
from harness.system.process import no_garbage_collection
from harness.train.phases import COPIED, FETCHED, NEXT, START, Mark

Clock = Callable[[], float]
Step = Callable[[object, Mark], tuple[Tensor, Tensor | float]]
"""One optimizer step on a batch, marking its phases: (sum of the losses, weight), both detached and unread.

With accumulation the batch is an iterator over its micro-batches.
"""
Copy = Callable[[object], object]


@dataclass(frozen=True)
class Window:
    """One rank's window: its duration, each step's time and the part of it that waited for data, in seconds.

    ``phases``: seconds of the whole window by phase, on the host's clock on a CPU, on the stream's on a GPU, where
    ``host_phases`` has the host's; empty if they were not marked.
    ``losses`` and ``weights`` have one entry a step.
    """

    duration_s: float
    step_s: Sequence[float]
    wait_s: Sequence[float]
    losses: Sequence[float]
    weights: Sequence[float]
    phases: Mapping[str, float]
    host_phases: Mapping[str, float]

    @property
    def steps(self) -> int:
        return len(self.step_s)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every device has finished its work; a CPU has none left when a call returns."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


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
) -> Window:
    """Take ``steps`` steps on batches that are fetched and copied. ``advance``, once a step, never waits."""
    losses, weights = [], []
    if micro_batches > 1:
        step, copy = _accumulating(step, fetch, copy, micro_batches)
    mark = marks.mark
    with no_garbage_collection():
        synchronize()
        start = clock()
        for _ in range(steps):
            mark(START)
            batch = next(fetch)
            mark(FETCHED)
            batch = copy(batch)
            mark(COPIED)
            loss, weight = step(batch, mark)
            losses.append(loss)
            weights.append(weight)
            advance()
        mark(START)
        synchronize()
        duration = clock() - start
    read = marks.read()
    return Window(duration, read.step_s, read.wait_s, _read(losses), _read(weights), read.phases, read.host_phases)


def _read(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values of a window's steps in one copy: kept on the device, they would count as the training's."""
    tensors = [value.reshape(1) for value in values if isinstance(value, Tensor)]
    alike = tensors and len(tensors) == len(values)
    return [float(value) for value in (torch.cat(tensors).tolist() if alike else values)]


def _accumulating(step: Step, fetch: Iterator[object], copy: Copy, count: int) -> tuple[Step, Copy]:
    """Return step and copy of a window whose steps take ``count`` micro-batches, none of which is kept here."""

    box: list[object] = []

    def boxed(batch: object) -> object:
        box.append(copy(batch))
        return box

    def accumulate(_: object, mark: Mark) -> tuple[Tensor, Tensor | float]:
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
