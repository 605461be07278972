"""The exposed time of collectives, from event lists in the form that torch's profiler gives on CUDA and on a CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from harness.config.strategy_traits import BUILTIN_TRAITS, ProfiledPart
from harness.measure import profiles
from harness.measure.profiles import (
    CollectiveTime,
    Event,
    Intervals,
    MarkedSteps,
    busy_s,
    collective_times,
    minus,
    union,
)

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FSDP, DP = BUILTIN_TRAITS["fsdp"].profiled_parts, BUILTIN_TRAITS["dp"].profiled_parts
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
US = 1000


def kernel(name: str, start: int, end: int, *, gpu: int = 0, by: int = 0, annotation: bool = False) -> Event:
    """Return what a GPU ran, in microseconds; ``by``: the call that launched it."""
    return Event(name, (start * US, end * US), gpu, launched_by=by, annotation=annotation)


def call(name: str, start: int, end: int, *, thread: int | None = 1, number: int = 0) -> Event:
    """Return a call on the host, in microseconds."""
    return Event(name, (start * US, end * US), thread=thread, correlation=number)


def us(total: float, exposed: float) -> CollectiveTime:
    return CollectiveTime(pytest.approx(total * 1e-6), pytest.approx(exposed * 1e-6))


def of_fsdp(events: list[Event], device: torch.device) -> tuple[CollectiveTime | None, ...]:
    """The times of the all-gathers, of the reductions and of the copies of shards."""
    times = collective_times(events, FSDP, device)
    return times.get("all-gather"), times.get("reduce-scatter"), times.get("shard copies")


@pytest.mark.parametrize(
    ("kept", "removed", "left"),
    [
        ([(0, 10)], [(2, 3), (5, 6)], [(0, 2), (3, 5), (6, 10)]),
        ([(0, 4), (6, 9)], [(3, 7)], [(0, 3), (7, 9)]),
        ([(2, 4), (5, 6)], [(0, 9)], []),
        ([(2, 4)], [], [(2, 4)]),
        ([(2, 4)], [(0, 2), (4, 5)], [(2, 4)]),
    ],
)
def test_a_difference_of_unions(kept: Intervals, removed: Intervals, left: Intervals) -> None:
    assert minus(kept, removed) == left


def test_a_gpu_is_busy_while_a_kernel_runs_or_it_copies_and_the_least_busy_counts() -> None:
    both = (GPU, torch.device("cuda", 1))
    events = [
        *(kernel("gemm", 0, 10), kernel("Memcpy HtoD", 5, 20), kernel("ncclDevKernel_AllReduce", 40, 60)),
        kernel("a range", 0, 100, annotation=True),
        *(kernel("gemm", 0, 90, gpu=1), call("cudaLaunchKernel", 0, 100)),
    ]
    steps = MarkedSteps((0, 200 * US), 2, events)
    assert busy_s(steps, [GPU]) == pytest.approx(20e-6)
    assert busy_s(steps, both) == pytest.approx(20e-6) and busy_s(steps, both[1:]) == pytest.approx(45e-6)
    assert busy_s(steps, [CPU]) is None
    assert busy_s(steps, [torch.device("cuda", 2)]) is None
    lost = call("cudaLaunchKernel", 0, 1, number=5)
    assert busy_s(steps._replace(events=[*events, lost]), [GPU]) is None


def test_a_union_joins_what_overlaps_or_touches() -> None:
    assert union([(5, 7), (0, 2), (6, 9), (2, 3)]) == [(0, 3), (5, 9)]


def test_on_a_gpu_the_time_that_kernels_cover_is_not_exposed() -> None:
    events = [
        kernel(GATHER, 0, 100),
        kernel("ampere_sgemm", 30, 80),
        kernel("elementwise", 70, 90),
        kernel("Memcpy HtoD (Pinned -> Device)", 0, 30),  # a copy computes nothing
        kernel("ampere_sgemm", 0, 100, gpu=1),  # nor does another GPU's kernel cover it
    ]
    assert of_fsdp(events, GPU) == (us(100, 30 + 10), None, None)


def test_an_annotation_on_a_gpu_is_no_computation_and_counts_only_without_its_kernel() -> None:
    annotation = kernel("nccl:_all_gather_base", 0, 110, annotation=True)
    region = kernel("FSDP::all_gather (layers.0)", 0, 120, annotation=True)
    both = collective_times([kernel(GATHER, 0, 100), annotation, region], FSDP, GPU)
    assert both["all-gather"] == us(100, 100)
    assert collective_times([annotation, region], FSDP, GPU)["all-gather"] == us(110, 110)


def test_time_of_two_collectives_at_once_counts_once() -> None:
    events = [kernel(GATHER, 0, 100), kernel(SCATTER, 60, 140), kernel("ampere_sgemm", 130, 150)]
    assert of_fsdp(events, GPU) == (us(100, 100), us(80, 30), None)


def test_what_a_replicating_call_launches_belongs_to_it_with_the_calls_inside() -> None:
    events = [
        call("Broadcast", 0, 50, number=7),
        call("aten::copy_", 10, 20, number=8),
        call("aten::mm", 60, 70, number=9),
        call("aten::mm", 10, 20, thread=2, number=10),  # at the same time, in another thread
        kernel("ncclDevKernel_Broadcast_RING_LL", 100, 140, by=7),
        kernel("Memcpy DtoD (Device -> Device)", 140, 150, by=8),
        kernel("ampere_sgemm", 145, 180, by=9),
        kernel("ampere_sgemm", 120, 125, by=10),
        kernel("elementwise", 300, 400),
    ]
    times = collective_times(events, DP, GPU)
    assert times["replicate"] == us(50, 20 + 15 + 5)
    assert "gather" not in times


def test_without_kernels_collectives_are_unknown_though_their_calls_are_seen() -> None:
    """A container without the right to use CUPTI."""
    calls = [call("Broadcast", 0, 50, number=1), call("Gather", 60, 70, number=2), call("nccl:_all_gather_base", 0, 9)]
    assert collective_times(calls, DP, GPU) == collective_times(calls, FSDP, GPU) == {}


def test_on_a_cpu_the_caller_waits_while_gloos_thread_works_unless_it_computes() -> None:
    events = [
        call("c10d::_allgather_base_", 0, 10),
        call("gloo:all_gather", 5, 100, thread=3),
        call("aten::copy_", 20, 30, thread=3),  # gloo's own copy is no computation of the step
        call("aten::mm", 60, 75),
        call("FSDP::pre_forward", 0, 110),
    ]
    assert collective_times(events, FSDP, CPU)["all-gather"] == us(100, 85)


def test_copies_of_shards_are_fsdps_ranges_without_the_collective_that_they_start() -> None:
    events = [
        call("FSDP::all_gather (layers.0)", 0, 30),
        call("aten::copy_", 5, 10),
        call("c10d::_allgather_base_", 20, 28),
        call("gloo:all_gather", 24, 60, thread=3),
        call("aten::mm", 35, 40),
        call("FSDP::all_gather_copy_out (layers.0)", 60, 72),
        call("aten::split_with_sizes_copy", 62, 70),
        call("FSDP::pre_forward (layers.0)", 0, 90),  # on one device too
    ]
    assert of_fsdp(events, CPU) == (us(40, 35), None, us(30 - 8 + 12, 20 + 12))  # without the collective's call


def test_the_all_gather_that_fsdps_copies_are_launched_beside_is_no_copy() -> None:
    """torch calls foreach_all_gather, with its copies and the collective, inside FSDP::all_gather."""
    calls = [call("FSDP::all_gather (layers.0)", 0, 40), call("aten::copy_", 1, 2, number=1)]
    calls += [call("nccl:_all_gather_base", 5, 30), call("c10d::_allgather_base_", 6, 7, number=2)]
    kernels = [kernel("foreach_copy", 0, 1000, by=1), kernel(GATHER, 1000, 11000, by=2)]
    kernels.append(kernel("nccl:_all_gather_base", 1000, 11000, annotation=True))
    assert of_fsdp(calls + kernels, GPU) == (us(10000, 10000), None, us(1000, 1000))


@pytest.mark.parametrize("name", ["ncclKernel_AllGather_RING_LL_Sum_int8_t", "ncclSymkDevKernel_AllGather_ST"])
def test_a_kernel_of_nccl_by_any_name_is_no_copy(name: str) -> None:
    """Its annotation has the time of the all-gather."""
    kernels = [kernel("foreach_copy", 0, 10, by=1), kernel(name, 10, 50, by=1)]
    kernels.append(kernel("nccl:_all_gather_base", 10, 50, annotation=True))
    assert of_fsdp([call("FSDP::all_gather", 0, 40, number=1), *kernels], GPU) == (us(40, 40), None, us(10, 10))


def test_copies_of_gloos_all_gather_between_gpus_are_its_own() -> None:
    calls = [call("FSDP::all_gather", 0, 40, number=1), call("c10d::_allgather_base_", 10, 30, number=2)]
    kernels = [kernel("foreach_copy", 0, 10, by=1), kernel("Memcpy DtoH (Device -> Pinned)", 10, 30, by=2)]
    assert of_fsdp(calls + kernels, GPU) == (us(20, 20), None, us(10, 10))


def test_copies_of_shards_that_a_gpu_makes_beside_its_kernels_are_not_exposed() -> None:
    copies = [call("aten::copy_", at, at + 1, number=number) for number, at in ((1, 1), (2, 3), (3, 21))]
    ranges = [call("FSDP::all_gather (layers.0)", 0, 9), call("FSDP::all_gather_copy_out (layers.0)", 20, 25)]
    kernels = [kernel("split_with_sizes_copy", 0, 20, by=1), kernel(GATHER, 20, 60, by=2)]
    kernels += [kernel("chunk_cat", 60, 70, by=3), kernel("ampere_sgemm", 10, 40)]
    assert of_fsdp([*ranges, *copies, *kernels], GPU) == (us(40, 20), None, us(20 + 10, 10 + 10))


def test_on_a_cpu_the_operators_inside_a_call_are_the_collective_unless_it_ends_in_another_thread() -> None:
    events = [call("Broadcast", 0, 50), call("aten::clone", 5, 45), call("aten::mm", 10, 20, thread=2)]
    assert collective_times(events, DP, CPU)["replicate"] == us(50, 40)
    apart = [call("gloo:all_gather", 0, 100, thread=None), call("aten::mm", 20, 60)]
    assert collective_times(apart, FSDP, CPU)["all-gather"] == us(100, 60)


@pytest.fixture(scope="module")
def recorded() -> list[Event]:
    """The profile of five steps of a small ResNet under fsdp on one H100 (torch 2.11, CUDA 13.0, driver 580)."""
    with gzip.open(Path(__file__).with_name("fixtures") / "h100_fsdp_5_steps.json.gz") as file:
        return [Event(name, (start, end), *rest) for name, (start, end), *rest in json.load(file)]


def test_kernels_of_a_recorded_profile_belong_to_the_operators_that_launched_them(recorded: list[Event]) -> None:
    """CUDA's own calls have numbers that operators have too: by them a convolution was a part of a reduction."""
    part = ProfiledPart("reduce", ("FSDP::post_backward_reduce",), waits=False)
    collectives, computation = profiles._on_gpu(recorded, [part], 0)
    kernels = [kernel.name for kernel in collectives["reduce"] if not kernel.name.startswith(profiles.MEMORY)]
    assert len(kernels) == 4 * profiles.PROFILED_STEPS  # one for the gradients of each of the four groups
    assert all(name.startswith("void at::native::detail::chunk_cat_cuda_kernel") for name in kernels)
    assert len(computation) == 480 - len(kernels) and not any(k.name.startswith(profiles.MEMORY) for k in computation)


def test_each_launch_of_a_recorded_profile_has_its_kernel(recorded: list[Event]) -> None:
    """So that a launch without one is a record that CUPTI lost: at the start of a profile, by issue 192021 of torch."""
    begin, end = 0, max(event.span[1] for event in recorded)
    marks = [Event(profiles.MARK, (at, at), thread=0) for at in (begin, end)]
    marked = profiles.marked_steps([*marks, *recorded])
    assert (marked.steps, len(marked.launched), marked.lost) == (1, 96 * profiles.PROFILED_STEPS, 0)
    kernels = sorted((e for e in recorded if e.gpu is not None and not e.annotation), key=lambda event: event.span)
    first = {e.correlation for e in kernels[:20]}
    left = [e for e in recorded if e.gpu is None or e.annotation or e.correlation not in first]
    copies = sum(e.name.startswith(profiles.MEMORY) for e in kernels[:20])
    assert profiles.marked_steps([*marks, *left]).lost == 20 - copies


def test_one_gpu_exchanges_nothing_in_a_recorded_profile(recorded: list[Event]) -> None:
    assert collective_times(recorded, FSDP, GPU) == {}
    kernels = [event for event in recorded if event.gpu == 0 and not event.annotation]
    assert len(kernels) == 160 * profiles.PROFILED_STEPS and not any(k.name.startswith("nccl") for k in kernels)
