"""A timed window: steps between two device syncs, without any observer inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.measure.phase_timers import Marks
from harness.system.process import no_garbage_collection
from harness.train.phases import COPIED, FETCHED, START, Mark

Clock = Callable[[], float]
Step = Callable[[object, Mark], tuple[Tensor, Tensor | float]]
"""One optimizer step on a batch, marking its phases: (sum of the losses, weight), both detached and unread."""


@dataclass(frozen=True)
class Window:
    """One rank's window: its duration, each step's time and the part of it that waited for data, in seconds.

    ``phases``: seconds of the whole window by phase, on the host's clock on a CPU, on the stream's on a GPU, where
    ``host_phases`` has the host's; empty if they were not marked.
    ``losses`` and ``weights`` are still on the device, one entry a step.
    """

    duration_s: float
    step_s: Sequence[float]
    wait_s: Sequence[float]
    losses: Sequence[Tensor]
    weights: Sequence[Tensor | float]
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
    copy: Callable[[object], object],
    steps: int,
    marks: Marks,
    synchronize: Callable[[], None],
    advance: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> Window:
    """Take ``steps`` steps on batches that are fetched and copied. ``advance``, once a step, never waits."""
    losses, weights = [], []
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
    timings = marks.read()
    return Window(duration, timings.step_s, timings.wait_s, losses, weights, timings.phases, timings.host_phases)
