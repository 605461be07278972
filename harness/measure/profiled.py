"""The collectives of dp and fsdp, from a few profiled steps: they are never timed, as profiling costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.measure.stepper import Stepper

STEPS = 3
DP = {
    "dp_replicate_s": ("Broadcast",),
    "dp_scatter_s": ("Scatter",),
    "dp_gather_s": ("Gather",),
    "dp_reduce_s": ("BroadcastBackward",),
}
"""Autograd functions of nn.DataParallel; our replicas on CPU slots are named alike."""
FSDP = {
    "fsdp_all_gather_s": ("gloo:all_gather", "ncclDevKernel_AllGather", "nccl:_all_gather_base"),
    # gloo reduces and scatters by way of an all-reduce
    "fsdp_reduce_scatter_s": ("gloo:all_reduce", "ncclDevKernel_ReduceScatter", "nccl:_reduce_scatter_base"),
}


def measure_collectives(strategy: str, stepper: Stepper) -> dict[str, float]:
    """Seconds a step of each collective on this rank, whether or not computing goes on beside it.

    On a GPU a collective's kernels count; on a CPU its call, or the time that gloo's thread is at it.
    """
    names: Mapping[str, Iterable[str]] = DP if strategy == "dp" else FSDP
    cuda = stepper.ranks.devices[0].type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    stepper.ranks.barrier()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            stepper.step()
        if cuda:
            torch.cuda.synchronize(stepper.ranks.devices[0])
    events = profiler.key_averages()
    return {
        column: sum(_seconds(event, cuda) for event in events if _is(event, keys)) for column, keys in names.items()
    }


def _is(event: Any, keys: Iterable[str]) -> bool:
    """The function itself, or a kernel whose name goes on after it."""
    return any(event.key == key or (key.startswith("nccl") and event.key.startswith(key)) for key in keys)


def _seconds(event: Any, cuda: bool) -> float:
    microseconds = event.device_time_total if cuda else event.cpu_time_total
    return float(microseconds) / 1e6 / STEPS
