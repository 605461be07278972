"""The recorder inside a script's process: which steps count, and the order of its device calls at a window's edges."""

from __future__ import annotations

import gc
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.measure.script import counting
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder
from harness.measure.script.messages import EndOfTrial, Finished, Schedule, WindowsBegun


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)


def recorded(schedule: Schedule, *, counts: int = 0) -> tuple[StepRecorder, Any]:
    """A recorder that knows its schedule and has been told to end, and the parent's connection."""
    ours, theirs = Pipe()
    recorder = StepRecorder(theirs, lambda: None, Counting(optimizer=counts))
    ours.send(schedule)
    recorder._follow()
    ours.send("end")
    return recorder, ours


def finished(parent: Any) -> Finished:
    found = []
    while parent.poll():
        found.append(parent.recv())
    assert [type(each) for each in found] == [WindowsBegun, Finished]
    last: Finished = found[-1]
    return last


@pytest.mark.parametrize(("counts", "expected"), [(0, "G"), (1, "D"), (2, "E")])
def test_the_steps_of_one_optimizer_count_by_the_order_of_their_first_steps(counts: int, expected: str) -> None:
    recorder, parent = recorded(Schedule(start=1, steps=2, windows=1), counts=counts)
    named = {name: optimizer() for name in "GDE"}
    taken = ""
    with pytest.raises(EndOfTrial):
        for name in "GDE" * 4:
            before = len(recorder._steps.ended)
            taken += name * (len(recorder._steps.ended) - before)
            recorder._after_optimizer(named[name])
            taken += name * (len(recorder._steps.ended) - before)
    assert taken + expected == expected * 3  # the last one raises
    assert finished(parent).facts.optimizers == ["SGD"] * 3


def test_an_optimizer_that_takes_the_place_of_one_that_is_gone_goes_on() -> None:
    recorder, parent = recorded(Schedule(start=1, steps=4, windows=1))
    with pytest.raises(EndOfTrial):
        for _ in range(3):
            of_fold = optimizer()
            for _ in range(2):
                recorder._after_optimizer(of_fold)
            del of_fold
            gc.collect()
    end = finished(parent)
    assert len(end.steps.ended) == 5
    assert end.facts.optimizers == ["SGD"]  # no note of a choice between several


class Event:
    """A CUDA event whose time is the number of calls before it was recorded."""

    calls: list[str]

    def __init__(self, enable_timing: bool) -> None:
        self.at = -1

    def record(self, stream: object) -> None:
        self.at = len(self.calls)
        self.calls.append(f"record {stream}")

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 * (other.at - self.at)


def test_on_a_gpu_events_are_made_before_and_devices_synchronised_in_the_warm_up_and_at_edges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    Event.calls = calls
    for name, fake in {
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "current_stream": lambda device: device,
        "synchronize": lambda device: calls.append(f"synchronize {device}"),
        "max_memory_allocated": lambda device: 5,
        "max_memory_reserved": lambda device: 7,
        "get_device_properties": lambda device: SimpleNamespace(uuid="1f"),
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    ticks = iter(range(1000))
    monkeypatch.setattr(counting, "clock", lambda: (calls.append("clock"), float(next(ticks)))[1])
    recorder, parent = recorded(Schedule(start=2, steps=2, windows=1))
    with pytest.raises(EndOfTrial):
        for _ in range(6):
            calls.append("step")
            recorder.step()
    sync = "synchronize cuda:1"
    record = "record cuda:1"
    first = ["step", sync, "clock", "step", sync, "clock", sync, *[record] * 3, sync, "clock", record]
    assert calls == [*first, "step", "clock", record, "step", "clock", record, sync, "clock"]
    end = finished(parent)
    assert len(end.steps.device_s) == 2 and min(end.steps.device_s) > 0
    memory = end.facts.memory
    assert (end.facts.gpus, memory["peak_memory_bytes"], memory["peak_reserved_bytes"]) == (["GPU-1f"], 5, 7)


class Clipped(torch.optim.Adam):
    """A step of a class of one's own, which calls the one that it is derived from."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_inside_a_derived_class_s_own_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    taken: list[bool] = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: taken.append(counting.is_inside_own_step(optimizer))
    )
    try:
        torch.optim.Adam([parameter]).step()  # whose class torch's hooks follow from now on
        Clipped([parameter]).step()
    finally:
        handle.remove()
    assert taken == [False, True, False]
