"""Windows and phases with a fake clock: what is timed, what is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from harness.config.sections import Throughput
from harness.measure import window as windows
from harness.measure.stepper import of_slowest, step_columns, step_quantiles
from harness.measure.throughput import pace, window_length
from harness.measure.window import CudaTimer, HostTimer, Marks, Window, marks_for, measure_window
from harness.train.training import STEP, Phase

IDLE: dict[str, Any] = {"copy": lambda batch: batch, "synchronize": lambda: None, "advance": lambda: None}


class FakeClock:
    """Time passes only when somebody works."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def window_of(step: Any, steps: int, source: Any = None, clock: Any = None, parts: int = 1, **more: Any) -> Window:
    """What a window of these steps measures; ``parts``: the micro-batches of a step."""
    clock = clock or FakeClock()
    marks = HostTimer(clock, detailed=False, micro_batches=parts)
    return measure_window(
        step, source or count(), **IDLE | more, steps=steps, marks=marks, clock=clock, micro_batches=parts
    )


def test_a_window_has_the_cpu_time_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"thread_time": 7.0, "process_time": 9.0}

    def step(batch: int, mark: Any) -> tuple[torch.Tensor, int]:
        spent["thread_time"] += 2.0
        spent["process_time"] += 3.0
        return torch.tensor(0.0), 1

    for name in spent:
        monkeypatch.setattr(windows.time, name, lambda name=name: spent[name])
    window = window_of(step, 4)
    assert (window.thread_cpu_s, window.process_cpu_s) == (8.0, 12.0)


def test_a_window_is_from_sync_to_sync_at_its_edges_and_the_wait_is_inside_the_step() -> None:
    clock, log = FakeClock(), list[str]()

    def step(batch: int, mark: Any) -> tuple[torch.Tensor, int]:
        clock.now += 2.0
        log.append(f"step {batch}")
        return torch.tensor(float(batch)), 1

    def source() -> Iterator[int]:
        for number in count():
            clock.now += 0.5
            yield number

    def synchronize() -> None:
        clock.now += 0.25
        log.append("sync")

    window = window_of(step, 3, source(), clock, synchronize=synchronize, advance=lambda: log.append("advance"))
    assert window.duration_s == pytest.approx(3 * 2.5 + 0.25)
    assert window.step_s == pytest.approx([2.5] * 3) and window.wait_s == pytest.approx([0.5] * 3)
    assert log == ["sync", "step 0", "advance", "step 1", "advance", "step 2", "advance", "sync"]


CLOCK = FakeClock()


class OnDevice(torch.Tensor):
    """A number of a device, which takes long to read."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]  # as it says

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

    window = window_of(step, 3, clock=CLOCK, parts=micro_batches)
    assert window.values == {"loss": [0.0, 1.0, 2.0], "weight": [4.0, 4.0, 4.0]}
    assert all(type(value) is float for values in window.values.values() for value in values)
    assert window.duration_s == 6.0 and sum(window.step_s) == 6.0  # reading them took 1,000
    assert [loss() for loss in kept] == [None] * 3


@pytest.mark.parametrize("weight", [torch.tensor, float, lambda number: number if number % 2 else torch.tensor(number)])
def test_a_long_window_keeps_few_tensors_on_the_device(monkeypatch: pytest.MonkeyPatch, weight: Any) -> None:
    """Each takes 512 bytes there: those of 10,000 steps would be 10 MB of the training's peak."""
    monkeypatch.setattr(windows, "MOST_KEPT", 10)
    alive, most, reads = weakref.WeakSet[torch.Tensor](), 0, CLOCK.now

    def step(number: int, mark: Any) -> tuple[torch.Tensor, Any]:
        nonlocal most
        most = max(most, len(alive))
        alive.add(loss := torch.tensor(float(number)).as_subclass(OnDevice))
        return loss, weight(number)

    window = window_of(step, 105, clock=CLOCK)
    assert window.values == {name: [float(n) for n in range(105)] for name in ("loss", "weight")}
    assert most <= 10 and window.duration_s == 0.0 and CLOCK.now == reads + 1000.0  # all losses are read at once


def test_losses_that_are_not_finite_are_kept_as_they_are() -> None:
    losses = iter([1.5, float("nan"), float("inf")])
    window = window_of(lambda batch, mark: (torch.tensor(next(losses), dtype=torch.bfloat16), 1), 3)
    assert [str(loss) for loss in window.values["loss"]] == ["1.5", "nan", "inf"]


def test_the_garbage_collector_is_disabled_inside_a_window_and_restored_also_if_a_step_raises() -> None:
    assert gc.isenabled()
    enabled = window_of(lambda batch, mark: (torch.tensor(float(gc.isenabled())), 1), 2).values["loss"]
    assert enabled == [0.0, 0.0] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        window_of(lambda batch, mark: 1 / 0, 1)
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

    window = window_of(step, 2, source(), clock, parts=3, copy=copied)
    assert log[:6] == ["fetch 0", "compute 0 of 1", "fetch 1", "compute 1 of 1", "fetch 2", "compute 2 of 1"]
    assert len(log) == 12, "a step takes its own micro-batches, no more"
    assert window.step_s == pytest.approx([7.5, 7.5]) and window.wait_s == pytest.approx([1.5, 1.5])


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

    batches = source()
    warm_up = window_of(step, 20, batches, clock)
    steps = window_length(Throughput(window_steps=10, window_seconds=5.0), pace(warm_up.step_s))
    assert window_of(step, steps, batches, clock).duration_s == pytest.approx(5.0, rel=0.3)


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
def test_a_window_has_least_steps_and_seconds(steps: int, seconds: float, warmup: list[float], expected: int) -> None:
    assert window_length(Throughput(window_steps=steps, window_seconds=seconds), pace(warmup)) == expected


FURTHER = (Phase.NEXT, Phase.FETCHED, Phase.COPIED, Phase.FORWARD)
THREE_PARTS = (*STEP[: STEP.index(Phase.BACKWARD)], *FURTHER, *FURTHER, Phase.BACKWARD, Phase.OPTIMIZER)
"""The points of a step of three micro-batches."""


def marked(marks: Marks, steps: int, points: Sequence[Phase] = STEP) -> Marks:
    for point in (*(points * steps), Phase.START):
        marks.mark(point)
    return marks


@pytest.mark.parametrize(
    ("points", "parts", "detailed", "step_s", "wait_s", "of_phases"),
    [
        (STEP, 1, True, 7.0, 1.0, (2, 2, 4, 2, 2, 2)),
        (STEP, 1, False, 2.0, 1.0, ()),  # two marks a step
        (THREE_PARTS, 3, True, 15.0, 3.0, (6, 6, 4, 6, 6, 2)),
        (THREE_PARTS, 3, False, 6.0, 3.0, ()),
    ],
)
def test_phases_are_sums_over_micro_batches_and_add_up_to_the_steps(
    points: tuple[Phase, ...], parts: int, detailed: bool, step_s: float, wait_s: float, of_phases: tuple[int, ...]
) -> None:
    clock = count(0.0, 1.0)
    marks = HostTimer(lambda: next(clock), detailed=detailed, micro_batches=parts)
    result = marked(marks, 2, points).read()
    names = ("wait", "copy", "rest", "forward", "backward", "optimizer")[: len(of_phases)]
    assert (result.step_s, result.wait_s) == ([step_s] * 2, [wait_s] * 2)
    assert result.phases == dict(zip(names, of_phases, strict=True)) and sum(of_phases) in (0, 2 * step_s)


def test_marking_costs_little_is_measured_once_and_every_gap_has_a_name_on_both_clocks() -> None:
    cpu = torch.device("cpu")
    assert 0 < windows.cost_s(cpu) == windows.cost_s(cpu) < 1e-3
    assert isinstance(marks_for((cpu,), 3), HostTimer)
    assert len(windows.HOST) == len(windows.DEVICE) == len(STEP)


def test_phases_are_marked_where_that_is_next_to_nothing_of_a_step() -> None:
    cpu = torch.device("cpu")
    longest = windows.cost_s(cpu) / windows.MAX_OVERHEAD
    assert windows.phases_are_cheap(cpu, 1, 1.01 * longest) and not windows.phases_are_cheap(cpu, 1, 0.99 * longest)
    assert windows.phases_are_cheap(cpu, 4, 4.01 * longest)
    assert not windows.phases_are_cheap(cpu, 4, 1.01 * longest)  # each micro-batch is marked
    assert not windows.phases_are_cheap(torch.device("cuda"), 1, 3600.0)  # events are read after the window


class Event:
    """Stands for torch.cuda.Event: the stream comes to each one ten milliseconds after the one before.

    As torch's it is created at its first record.
    """

    recorded = count(0)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None
        self.exists = self.waited_for = False

    def record(self, stream: object) -> None:
        assert stream == "the stream"
        self.at, self.exists = next(self.recorded), True

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None
        return 10.0 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU as far as events go."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    return torch.device("cuda", 0)


def test_a_gpus_stream_is_partitioned_by_events_that_add_up_to_the_step(gpu: torch.device) -> None:
    marks = marks_for((gpu,), 3)
    assert isinstance(marks, CudaTimer)
    assert all(event.exists for event in marks._events), "before the window"  # type: ignore[attr-defined]
    result = marked(marks, 3).read()
    assert result.step_s == pytest.approx([0.07, 0.07, 0.07])
    assert sum(result.phases.values()) == pytest.approx(0.21)
    names = {"idle", "copy", "rest", "forward", "backward", "optimizer"}
    assert set(result.phases) == names and result.phases["rest"] == pytest.approx(0.06)
    assert set(result.host_phases) == names - {"idle"} | {"wait"}  # the host's own clock, beside it
    for detailed, seconds in ((True, 0.15), (False, 0.01)):
        marks = marks_for((gpu,), 1, detailed=detailed, micro_batches=3)
        assert marked(marks, 1, THREE_PARTS).read().step_s == pytest.approx([seconds])


def test_an_epoch_on_a_gpu_records_no_events(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "Event")
    result = marked(HostTimer(beside=True), 3).read()
    assert len(result.step_s) == 3 and result.phases == {}
    assert set(result.host_phases) == {"wait", "copy", "rest", "forward", "backward", "optimizer"}


def test_without_detail_a_gpu_records_one_event_a_step(gpu: torch.device) -> None:
    marks = marked(marks_for((gpu,), 3, detailed=False), 3)
    assert isinstance(marks, CudaTimer) and len(marks._events) == 4
    result = marks.read()
    assert result.step_s == pytest.approx([0.01, 0.01, 0.01]) and result.phases == {}
    assert marks._events[-1].waited_for  # type: ignore[attr-defined]
    assert len(result.wait_s) == 3


def timed(step_s: list[float], wait_s: list[float], losses: list[float], **more: list[float]) -> Window:
    values = {"loss": losses, "weight": [2.0] * len(step_s), **more}
    return Window("timed", sum(step_s), step_s, wait_s, {}, {}, 1.0, values)


def test_of_each_step_the_slowest_rank_the_longest_wait_and_the_means_are_kept() -> None:
    nan = float("nan")
    first = timed([1.0, 3.0, 2.0], [0.4, nan, 0.5], [1.0, 2.0, 3.0], grad_norm=[4.0, 2.0, 0.0])
    second = timed([2.0, 1.0, 2.0], [0.3, nan, 0.2], [3.0, 2.0, nan], grad_norm=[2.0, 2.0, 1.0])
    kept = of_slowest([step_columns(rank, [window]) for rank, window in enumerate((first, second))])
    assert kept["rank"].tolist() == [1, 0, 0] and kept["step_s"].tolist() == [2.0, 3.0, 2.0]
    assert kept["mean_s"].tolist() == [1.5, 2.0, 2.0] and kept["step"].tolist() == [0, 1, 2]
    np.testing.assert_equal(kept["wait_s"], [0.4, nan, 0.5])
    assert kept["wait_rank"].tolist()[::2] == [0, 0]
    np.testing.assert_equal(kept["loss"], [1.0, 1.0, nan])  # a loss of one rank that is not finite shows
    assert kept["grad_norm"].tolist() == [3.0, 2.0, 0.5] and "weight" not in kept  # whatever a step reports
    tokens = [timed([1.0], [0.0], [total], weight=[weight]) for total, weight in ((9.0, 1.0), (22.0, 11.0))]
    (loss,) = of_slowest([step_columns(rank, [window]) for rank, window in enumerate(tokens)])["loss"]
    assert loss == pytest.approx(31.0 / 12.0)  # of the batch, whose tokens the ranks do not share evenly
    of_script = Window("timed", 3.0, [1.0, 2.0], [0.0, 0.0], {}, {}, 1.0)
    assert list(step_columns(0, [of_script])) == ["rank", "window", "step", "warmup", "step_s", "wait_s"]
    assert of_slowest([{}, {}]) == {}


def test_quantiles_of_a_rank_are_those_of_its_timed_steps() -> None:
    warm = replace(timed([9.0], [0.0], [0.0]), kind="warmup")
    found = step_quantiles([warm, timed([float(n) for n in range(101)], [0.0] * 101, [0.0] * 101)])
    assert found == {"step_p5_s": 5.0, "step_s": 50.0, "step_p95_s": 95.0}
