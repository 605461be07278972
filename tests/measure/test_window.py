"""Windows with a fake clock: what is timed, what is not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from harness.config.sections import Throughput
from harness.measure.phase_timers import HostTimer
from harness.measure.throughput import _pace, window_length
from harness.measure.window import measure_window

IDLE: dict[str, Any] = {"copy": lambda batch: batch, "synchronize": lambda: None, "advance": lambda: None}


class FakeClock:
    """Time passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_window(clock: FakeClock, *, step_s: float, wait_s: float, sync_s: float = 0.0, steps: int = 3) -> Any:
    log: list[str] = []

    def step(batch: int, mark: Any) -> tuple[torch.Tensor, int]:
        clock.now += step_s
        log.append(f"step {batch}")
        return torch.tensor(float(batch)), 1

    def source() -> Iterator[int]:
        for number in count():
            clock.now += wait_s
            yield number

    def synchronize() -> None:
        clock.now += sync_s
        log.append("sync")

    window = measure_window(
        step,
        source(),
        copy=lambda batch: batch,
        steps=steps,
        marks=HostTimer(clock, detailed=False),
        synchronize=synchronize,
        advance=lambda: log.append("advance"),
        clock=clock,
    )
    return window, log


def test_the_duration_is_from_sync_to_sync_and_the_wait_is_inside_the_step() -> None:
    window, _ = run_window(FakeClock(), step_s=2.0, wait_s=0.5, sync_s=0.25)
    assert window.duration_s == pytest.approx(3 * 2.5 + 0.25)
    assert window.step_s == pytest.approx([2.5] * 3)
    assert window.wait_s == pytest.approx([0.5] * 3)


def test_the_device_is_synchronised_at_the_edges_only() -> None:
    _, log = run_window(FakeClock(), step_s=1.0, wait_s=0.0)
    assert log == ["sync", "step 0", "advance", "step 1", "advance", "step 2", "advance", "sync"]


def test_losses_are_not_read_inside_a_window() -> None:
    window, _ = run_window(FakeClock(), step_s=1.0, wait_s=0.0)
    assert [float(loss) for loss in window.losses] == [0.0, 1.0, 2.0]
    assert window.steps == 3


def test_the_garbage_collector_is_disabled_inside_a_window_and_restored() -> None:
    seen = []

    def step(batch: Any, mark: Any) -> tuple[torch.Tensor, int]:
        seen.append(gc.isenabled())
        return torch.zeros(()), 1

    assert gc.isenabled()
    measure_window(
        step,
        iter([0, 1]),
        steps=2,
        marks=HostTimer(detailed=False),
        copy=lambda b: b,
        synchronize=lambda: None,
        advance=lambda: None,
    )
    assert seen == [False, False]
    assert gc.isenabled()


def test_the_garbage_collector_is_restored_if_a_step_raises() -> None:
    def step(batch: Any, mark: Any) -> tuple[torch.Tensor, int]:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        measure_window(
            step,
            iter([0]),
            steps=1,
            marks=HostTimer(detailed=False),
            copy=lambda b: b,
            synchronize=lambda: None,
            advance=lambda: None,
        )
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("steps", "seconds", "warmup", "expected"),
    [
        (10, 0.0, [0.1], 10),
        (10, 2.0, [0.1, 0.1], 20),
        (10, 2.0, [9.0, 0.1, 0.1], 20),
        (50, 1.0, [0.5, 0.5], 50),
        (2, 1.0, [0.3, 0.3], 4),
        (5, 1.0, [0.0, 0.0], 5),
    ],
)
def test_a_window_lasts_its_least_steps_and_seconds(
    steps: int, seconds: float, warmup: list[float], expected: int
) -> None:
    settings = Throughput(window_steps=steps, window_seconds=seconds)
    assert window_length(settings, _pace(warmup)) == expected
