"""Phases from marks, with a clock that moves one second a mark."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from harness.measure.marks import DEAR, DEVICE, HOST, POINTS, HostMarks, cost_s, marks_for, phases_are_cheap


def ticking(*, detailed: bool, steps: int = 2) -> HostMarks:
    clock = count(0.0, 1.0)
    marks = HostMarks(lambda: next(clock), detailed=detailed)
    for _ in range(steps):
        for point in range(len(POINTS)):
            marks.mark(point)
    marks.mark(0)
    return marks


def test_phases_add_up_to_the_steps() -> None:
    told = ticking(detailed=True).read()
    assert told.step_s == [7.0, 7.0]
    assert told.wait_s == [1.0, 1.0]
    assert told.phases == {"wait": 2.0, "copy": 2.0, "rest": 4.0, "forward": 2.0, "backward": 2.0, "optimizer": 2.0}
    assert sum(told.phases.values()) == pytest.approx(sum(told.step_s))


def test_without_detail_only_the_step_and_its_wait_are_marked() -> None:
    told = ticking(detailed=False).read()
    assert told.step_s == [2.0, 2.0]  # two marks a step
    assert told.wait_s == [1.0, 1.0]
    assert told.phases == {}


def test_every_gap_between_marks_has_a_name_on_both_clocks() -> None:
    assert len(HOST) == len(DEVICE) == len(POINTS)


def test_marking_costs_little_and_is_measured_once() -> None:
    cpu = torch.device("cpu")
    assert 0 < cost_s(cpu) == cost_s(cpu) < 1e-3
    assert isinstance(marks_for((cpu,), 3), HostMarks)


def test_phases_are_marked_where_that_is_next_to_nothing_of_a_step() -> None:
    cpu = torch.device("cpu")
    longest = cost_s(cpu) / DEAR
    assert phases_are_cheap(cpu, 1, 1.01 * longest) and not phases_are_cheap(cpu, 1, 0.99 * longest)
    assert phases_are_cheap(cpu, 4, 4.01 * longest) and not phases_are_cheap(
        cpu, 4, 1.01 * longest
    )  # each micro-batch is marked
    assert not phases_are_cheap(torch.device("cuda"), 1, 3600.0)  # events are read after the window


def test_with_accumulation_a_phase_is_the_sum_over_micro_batches() -> None:
    clock = count(0.0, 1.0)
    marks = HostMarks(lambda: next(clock), micro_batches=3)
    for _ in range(2):
        for point in (0, 1, 2, 3, 4, 3, 4, 3, 4, 5, 6):
            marks.mark(point)
    marks.mark(0)
    told = marks.read()
    assert told.step_s == [11.0, 11.0]
    assert told.wait_s == [1.0, 1.0]
    assert told.phases == {"wait": 2.0, "copy": 2.0, "rest": 4.0, "forward": 6.0, "backward": 6.0, "optimizer": 2.0}


def test_without_detail_accumulation_changes_nothing() -> None:
    clock = count(0.0, 1.0)
    marks = HostMarks(lambda: next(clock), detailed=False, micro_batches=2)
    for point in (0, 1, 2, 3, 4, 3, 4, 5, 6, 0):
        marks.mark(point)
    assert marks.read().step_s == [2.0]
