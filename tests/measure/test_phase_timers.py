"""Phases from marks, with a clock that moves one second a mark."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from harness.measure.window import (
    DEVICE,
    HOST,
    MAX_OVERHEAD,
    CudaTimer,
    HostTimer,
    Marks,
    cost_s,
    epoch_marks,
    marks_for,
    phases_are_cheap,
)
from harness.train.phases import STEP, Phase

FURTHER = (Phase.NEXT, Phase.FETCHED, Phase.COPIED, Phase.FORWARD)
THREE_PARTS = (*STEP[: STEP.index(Phase.BACKWARD)], *FURTHER, *FURTHER, Phase.BACKWARD, Phase.OPTIMIZER)
"""The points of a step of three micro-batches."""


def ticking(*, detailed: bool, steps: int = 2) -> HostTimer:
    clock = count(0.0, 1.0)
    marks = HostTimer(lambda: next(clock), detailed=detailed)
    for _ in range(steps):
        for point in STEP:
            marks.mark(point)
    marks.mark(Phase.START)
    return marks


def test_phases_add_up_to_the_steps() -> None:
    result = ticking(detailed=True).read()
    assert result.step_s == [7.0, 7.0]
    assert result.wait_s == [1.0, 1.0]
    assert result.phases == {"wait": 2.0, "copy": 2.0, "rest": 4.0, "forward": 2.0, "backward": 2.0, "optimizer": 2.0}
    assert sum(result.phases.values()) == pytest.approx(sum(result.step_s))


def test_without_detail_only_the_step_and_its_wait_are_marked() -> None:
    result = ticking(detailed=False).read()
    assert result.step_s == [2.0, 2.0]  # two marks a step
    assert result.wait_s == [1.0, 1.0]
    assert result.phases == {}


def test_every_gap_between_marks_has_a_name_on_both_clocks() -> None:
    assert len(HOST) == len(DEVICE) == len(STEP)


def test_marking_costs_little_and_is_measured_once() -> None:
    cpu = torch.device("cpu")
    assert 0 < cost_s(cpu) == cost_s(cpu) < 1e-3
    assert isinstance(marks_for((cpu,), 3), HostTimer)


def test_phases_are_marked_where_that_is_next_to_nothing_of_a_step() -> None:
    cpu = torch.device("cpu")
    longest = cost_s(cpu) / MAX_OVERHEAD
    assert phases_are_cheap(cpu, 1, 1.01 * longest) and not phases_are_cheap(cpu, 1, 0.99 * longest)
    assert phases_are_cheap(cpu, 4, 4.01 * longest)
    assert not phases_are_cheap(cpu, 4, 1.01 * longest)  # each micro-batch is marked
    assert not phases_are_cheap(torch.device("cuda"), 1, 3600.0)  # events are read after the window


def test_with_accumulation_a_phase_is_the_sum_over_micro_batches() -> None:
    clock = count(0.0, 1.0)
    marks = HostTimer(lambda: next(clock), micro_batches=3)
    for _ in range(2):
        for point in THREE_PARTS:
            marks.mark(point)
    marks.mark(Phase.START)
    result = marks.read()
    assert result.step_s == [15.0, 15.0]
    assert result.wait_s == [3.0, 3.0]
    assert result.phases == {"wait": 6.0, "copy": 6.0, "rest": 4.0, "forward": 6.0, "backward": 6.0, "optimizer": 2.0}


def test_without_detail_each_micro_batch_waits() -> None:
    clock = count(0.0, 1.0)
    marks = HostTimer(lambda: next(clock), detailed=False, micro_batches=3)
    for point in (*THREE_PARTS, Phase.START):
        marks.mark(point)
    result = marks.read()
    assert (result.step_s, result.wait_s, result.phases) == ([6.0], [3.0], {})


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


def marked(marks: Marks, steps: int) -> Marks:
    for _ in range(steps):
        for point in STEP:
            marks.mark(point)
    marks.mark(Phase.START)
    return marks


def test_a_gpus_stream_is_partitioned_by_events_that_add_up_to_the_step(gpu: torch.device) -> None:
    result = marked(marks_for((gpu,), 3), 3).read()
    assert result.step_s == pytest.approx([0.07, 0.07, 0.07])
    assert sum(result.phases.values()) == pytest.approx(0.21)
    names = {"idle", "copy", "rest", "forward", "backward", "optimizer"}
    assert set(result.phases) == names and result.phases["rest"] == pytest.approx(0.06)
    assert set(result.host_phases) == names - {"idle"} | {"wait"}  # the host's own clock, beside it


def test_events_exist_before_the_window(gpu: torch.device) -> None:
    marks = marks_for((gpu,), 3)
    assert isinstance(marks, CudaTimer) and all(event.exists for event in marks._events)  # type: ignore[attr-defined]


def test_an_epoch_on_a_gpu_records_no_events(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "Event")
    result = marked(epoch_marks((gpu,), 1), 3).read()
    assert len(result.step_s) == 3 and result.phases == {}
    assert set(result.host_phases) == {"wait", "copy", "rest", "forward", "backward", "optimizer"}


def test_micro_batches_partition_a_gpus_stream_too(gpu: torch.device) -> None:
    for detailed, seconds in ((True, 0.15), (False, 0.01)):
        marks = marks_for((gpu,), 1, detailed=detailed, micro_batches=3)
        for point in (*THREE_PARTS, Phase.START):
            marks.mark(point)
        assert marks.read().step_s == pytest.approx([seconds])


def test_without_detail_a_gpu_records_one_event_a_step(gpu: torch.device) -> None:
    marks = marked(marks_for((gpu,), 3, detailed=False), 3)
    assert isinstance(marks, CudaTimer) and len(marks._events) == 4
    result = marks.read()
    assert result.step_s == pytest.approx([0.01, 0.01, 0.01]) and result.phases == {}
    assert marks._events[-1].waited_for  # type: ignore[attr-defined]
    assert len(result.wait_s) == 3
