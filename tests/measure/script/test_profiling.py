"""The profile of the steps after a script's windows: what is exposed, and what the analysis gets of it."""

from __future__ import annotations

from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from harness.config.strategy_traits import COLLECTIVES
from harness.measure.profiles import MARK, PROFILED_STEPS, Event
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder
from harness.measure.script.loop import _run
from harness.measure.script.messages import EndOfTrial, Finished, Profiled, Schedule, WindowsBegun
from harness.measure.script.profiling import STEPS, ProfiledSteps, StepProfiler, seconds_of
from harness.measure.script.windows import exchange_of, profiled_windows
from harness.measure.stepper import window_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
S = 10**9


def event(name: str, start: float, end: float, **more: Any) -> Event:
    return Event(name, (round(start * S), round(end * S)), **more)


def marks(*times: float) -> list[Event]:
    return [event(MARK, time, time, thread=1) for time in times]


def test_on_a_cpu_a_collective_is_exposed_while_no_operator_runs() -> None:
    events = [
        event("gloo:all_reduce", 0.0, 0.9, thread=2),  # of the step before the first mark
        *marks(1, 3, 5),
        event("aten::mm", 1.0, 2.0, thread=1),
        event("gloo:all_reduce", 1.5, 2.75, thread=2),
        event("gloo:broadcast", 3.0, 3.25, thread=2),
        event("aten::mm", 3.25, 4.0, thread=1),
    ]
    found = seconds_of(events, CPU, wait_s=0.5)
    assert found == ProfiledSteps(step_s=2.0, wait_s=0.25, exchange_s=0.75, exposed_s=0.5, idle_s=None)


def test_on_a_gpu_kernels_of_nccl_are_exposed_and_without_any_kernel_it_is_idle() -> None:
    events = [
        *marks(0, 2, 4),
        event("gemm", 0.0, 1.0, gpu=0),
        event("ncclDevKernel_AllReduce_Sum_f32", 0.5, 2.0, gpu=0),
        event("nccl:all_reduce", 0.5, 4.0, gpu=0, annotation=True),
        event("gemm", 2.0, 2.5, gpu=0),
        event("gemm", 2.5, 4.0, gpu=1),  # of another process' GPU
    ]
    found = seconds_of(events, GPU, wait_s=0.0)
    assert found == ProfiledSteps(step_s=2.0, wait_s=0.0, exchange_s=0.75, exposed_s=0.5, idle_s=0.75)


def test_without_two_marks_or_kernels_of_a_gpu_nothing_is_known() -> None:
    assert seconds_of(marks(1), CPU, wait_s=0.0) is seconds_of(marks(1, 2), GPU, wait_s=0.0) is None
    kernels = [*marks(0, 2), event("gemm", 0.5, 1.0, gpu=0, correlation=1)]
    launches = [event("cudaLaunchKernel", 0.1, 0.2, thread=1, correlation=number) for number in (1, 2)]
    assert seconds_of([*kernels, launches[0]], GPU, wait_s=0.0)
    assert seconds_of([*kernels, *launches], GPU, wait_s=0.0) is None  # one that was launched is lost


def test_steps_of_one_process_have_no_exchange() -> None:
    profiler = StepProfiler([])
    for number in range(STEPS):
        torch.ones(64, 64) @ torch.ones(64, 64)
        assert profiler.step(0.0, 0.0) == (number == STEPS - 1)
    found = profiler.end()
    assert found and found.step_s > 0 and found.exchange_s == found.exposed_s == 0 and found.idle_s is None


def profiling_recorder() -> tuple[StepRecorder, Any]:
    """A recorder with one window of two steps after the first, and a profile; and its parent's connection."""
    ours, theirs = Pipe()
    recorder = StepRecorder(theirs, lambda: None, Counting(profiles=True))
    ours.send(Schedule(start=1, steps=2, windows=1))
    recorder._follow()
    ours.send("end")
    return recorder, ours


@pytest.mark.parametrize(("pause_s", "known"), [((1.0, 0.0), True), ((0.0, 1.0), False)])
def test_steps_with_a_pause_are_not_known_but_the_first_may_have_one(pause_s: tuple[float, float], known: bool) -> None:
    profiler = StepProfiler([])
    for number in range(STEPS):
        profiler.step(0.0, pause_s[min(number, 1)])
    assert (profiler.end() is not None) == known


def test_the_steps_of_a_script_with_a_profiler_of_its_own_are_counted_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        profiler = StepProfiler([])
        assert [profiler.step(0.0, 0.0) for _ in range(STEPS)] == [False] * (STEPS - 1) + [True]
        assert profiler.end() is None
    assert own.events()


@pytest.mark.parametrize("steps", [2, 4])
def test_a_loop_that_fails_after_its_last_window_is_measured(steps: int) -> None:
    recorder, parent = profiling_recorder()

    def loop(config: dict[str, Any]) -> None:
        for _ in range(steps):
            recorder.step()
        raise ValueError("no more data")

    if steps < 3:
        with pytest.raises(ValueError, match="no more data"):
            _run(loop, {}, recorder)
        return
    _run(loop, {}, recorder)
    assert [type(parent.recv()) for _ in range(3)] == [WindowsBegun, Finished, Profiled]


@pytest.mark.parametrize("steps", [1, 3, STEPS])
def test_the_steps_after_the_windows_are_profiled_and_those_of_a_script_that_ends_before_are_not(steps: int) -> None:
    recorder, ours = profiling_recorder()
    ended = False
    for _ in range(3 + steps):
        try:
            recorder.step()
        except EndOfTrial:
            ended = True
    recorder.finish()
    _, end, *others = [ours.recv() for _ in range(3)]
    assert isinstance(end, Finished) and len(end.steps.ended) == 3 and not end.by_itself
    (profiled,) = others
    assert isinstance(profiled, Profiled) and (profiled.steps is not None) == ended == (steps == STEPS)
    assert not ours.poll()
    assert not torch.autograd._profiler_enabled()  # torch may crash at the end of a process that profiles


def test_the_window_without_exchange_lacks_what_is_exposed_and_marks_the_wait_for_data() -> None:
    (own,) = window_rows(0, profiled_windows(ProfiledSteps(1.0, 0.25, 0.5, 0.25, None)))
    assert own["window_kind"] == "alone" and own["duration_s"] == 0.75 * PROFILED_STEPS
    assert own["wait_s"] == 0.25 * PROFILED_STEPS and own["rest_s"] == 0.5 * PROFILED_STEPS
    for idle_s, waiting_s in ((0.125, 0.125), (0.5, 0.25)):  # a GPU that waits for kernels waits for no data
        alone, whole = window_rows(0, profiled_windows(ProfiledSteps(1.0, 0.25, 0.5, 0.25, idle_s)))
        assert (alone["window_kind"], whole["window_kind"]) == ("alone", "phases")
        assert whole["idle_s"] == waiting_s * PROFILED_STEPS and whole["host_wait_s"] == 0.25 * PROFILED_STEPS


def test_the_exchange_is_that_of_the_rank_that_waits_least() -> None:
    ranks = [ProfiledSteps(1.0, 0.0, 0.75, exposed, None) for exposed in (0.5, 0.25)]
    ranks.append(ProfiledSteps(1.0, 0.0, 0.0, 0.0, None))  # whose profile shows no collective
    assert exchange_of(ranks) == {"exchange_s": {COLLECTIVES.name: 0.75}, "exposed_s": {COLLECTIVES.name: 0.25}}
    assert exchange_of([]) == exchange_of([ProfiledSteps(1.0, 0.0, 0.0, 0.0, None)]) == {}
