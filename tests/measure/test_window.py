"""Windows with a fake clock: what is timed, what is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from harness.config.sections import Throughput
from harness.measure.throughput import _pace, window_length
from harness.measure.window import HostTimer, measure_window

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


CLOCK = FakeClock()


class OnDevice(torch.Tensor):
    """A number of a device, which takes long to read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.cpu):
            CLOCK.now += 1000.0
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize(
    "weight", [lambda: torch.tensor(4.0).as_subclass(OnDevice), lambda: torch.tensor([4]), lambda: 4]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_are_read_after_the_window_and_not_kept_on_the_device(weight: Any, micro_batches: int) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def step(batch: Any, mark: Any) -> tuple[torch.Tensor, Any]:
        loss = torch.tensor(float(len(kept))).as_subclass(OnDevice)
        if micro_batches > 1:
            list(batch)
        CLOCK.now += 2.0
        kept.append(weakref.ref(loss))
        return loss, weight()

    window = measure_window(
        step, count(), steps=3, marks=HostTimer(CLOCK, detailed=False), clock=CLOCK, micro_batches=micro_batches, **IDLE
    )
    assert (window.losses, window.weights) == ([0.0, 1.0, 2.0], [4.0, 4.0, 4.0])
    assert all(type(value) is float for value in (*window.losses, *window.weights))
    assert window.duration_s == 6.0 and sum(window.step_s) == 6.0  # reading them took 1,000
    assert [loss() for loss in kept] == [None] * 3


def test_losses_that_are_not_finite_are_kept_as_they_are() -> None:
    losses = iter([1.5, float("nan"), float("inf")])

    def step(batch: Any, mark: Any) -> tuple[torch.Tensor, int]:
        return torch.tensor(next(losses), dtype=torch.bfloat16), 1

    window = measure_window(step, count(), steps=3, marks=HostTimer(detailed=False), **IDLE)
    assert [str(loss) for loss in window.losses] == ["1.5", "nan", "inf"]


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


def test_a_further_micro_batch_is_fetched_after_the_one_before_was_computed() -> None:
    clock, log, alive = FakeClock(), [], weakref.WeakSet[torch.Tensor]()

    def source() -> Iterator[torch.Tensor]:
        for number in count():
            clock.now += 0.5
            log.append(f"fetch {number}")
            yield torch.tensor(float(number))

    def copied(batch: torch.Tensor) -> torch.Tensor:
        alive.add(there := batch.clone())
        return there

    def step(batches: Any, mark: Any) -> tuple[torch.Tensor, int]:
        for batch in batches:
            clock.now += 2.0
            log.append(f"compute {float(batch):g} of {len(alive)}")
        return torch.zeros(()), 3

    marks = HostTimer(clock, detailed=False, micro_batches=3)
    window = measure_window(
        step, source(), **IDLE | {"copy": copied}, steps=2, marks=marks, clock=clock, micro_batches=3
    )
    assert log[:6] == ["fetch 0", "compute 0 of 1", "fetch 1", "compute 1 of 1", "fetch 2", "compute 2 of 1"]
    assert len(log) == 12, "a step takes its own micro-batches, no more"
    assert window.step_s == pytest.approx([7.5, 7.5])
    assert window.wait_s == pytest.approx([1.5, 1.5])


def test_a_window_of_batches_that_come_in_bursts_lasts_its_seconds() -> None:
    """Four workers, 0.1 s a batch each, 5 ms of computing: four batches every 0.1 s."""
    clock = FakeClock()

    def source() -> Iterator[int]:
        started = clock.now
        for number in count():
            clock.now = max(clock.now, started + 0.1 * (1 + number // 4))
            yield number

    def step(batch: int, mark: Any) -> tuple[torch.Tensor, int]:
        clock.now += 0.005
        return torch.zeros(()), 1

    def window(steps: int) -> Any:
        return measure_window(step, batches, **IDLE, steps=steps, marks=HostTimer(clock, detailed=False), clock=clock)

    batches = source()
    steps = window_length(Throughput(window_steps=10, window_seconds=5.0), _pace(window(20).step_s))
    assert window(steps).duration_s == pytest.approx(5.0, rel=0.3)


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
