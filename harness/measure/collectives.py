"""The cost of exchanging gradients and parameters: profiled collectives, windows with and without exchange."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Kernel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from harness.config.strategy_traits import StrategyTraits
from harness.measure.stepper import Stepper, TimedWindow

PROFILED_STEPS = 3


def measure_collectives(traits: StrategyTraits, stepper: Stepper) -> dict[str, float | None]:
    """Return seconds per step of each collective on this rank, overlapped or not; None if it does not occur.

    From a few profiled steps, which are never timed. On a GPU a collective's kernels count; on a CPU its call, or the
    time of gloo's thread.
    """
    names: Mapping[str, Iterable[str]] = {part.column: part.events for part in traits.profiled_parts}
    cuda = stepper.ranks.devices[0].type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    stepper.ranks.barrier()
    with profile(activities=activities, acc_events=cuda) as profiler:
        for _ in range(PROFILED_STEPS):
            stepper.step()
        if cuda:
            torch.cuda.synchronize(stepper.ranks.devices[0])
    events = (
        list(profiler.events()) if cuda else _host_calls(profiler, {key for keys in names.values() for key in keys})
    )
    seen = {column: _first_seen(events, keys, cuda) for column, keys in names.items()}
    return {column: None if seconds is None else seconds / PROFILED_STEPS for column, seconds in seen.items()}


class HostCall(NamedTuple):
    """A call on the host; microseconds, as in the profiler's own events."""

    name: str
    cpu_time_total: float


def _host_calls(profiler: profile, names: Collection[str]) -> list[HostCall]:
    """Return the calls of these names, without building events()' tree of all calls: 0.5 s for three steps."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    named = ((event, event.name()) for event in results.events())
    return [HostCall(name, event.duration_ns() / 1e3) for event, name in named if name in names]


def _first_seen(events: Sequence[HostCall | FunctionEvent], keys: Iterable[str], cuda: bool) -> float | None:
    """Return the seconds of the events of the first name that occurs; None if none does."""
    for key in keys:
        # the function itself, or a kernel whose name begins with the key
        named = [e for e in events if e.name == key or (key.startswith("nccl") and e.name.startswith(key))]
        if named:
            return _seconds(named, cuda)
    return None


def _seconds(events: Sequence[Any], cuda: bool) -> float:
    """Return the seconds of the calls on a CPU; on GPUs those of the kernels, of the device with the most."""
    if not cuda:
        return float(sum(event.cpu_time_total for event in events)) / 1e6
    by_device: dict[int, float] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            by_device[event.device_index] = by_device.get(event.device_index, 0.0) + event.time_range.elapsed_us()
        for kernel in _kernels(event):
            by_device[kernel.device] = by_device.get(kernel.device, 0.0) + kernel.duration
    return max(by_device.values(), default=0.0) / 1e6


def _kernels(event: FunctionEvent) -> Iterator[Kernel]:
    """Yield the kernels that a call, or a call inside it, started."""
    yield from event.kernels
    for child in event.cpu_children:
        yield from _kernels(child)


ROUNDS = 2
LEAST_STEPS = 5
LOGGED_STEPS = 5


def measure_communication(stepper: Stepper, steps: int) -> tuple[list[TimedWindow], dict[str, float]]:
    """Measure windows of a quarter of ``steps``, in turn without and with gradient exchange, and read DDP's own timers.

    Without exchange no rank waits for another, so the window shows the rank's own time. Parameters, buffers and
    optimizer state are restored.
    """
    training = stepper.training
    count = max(LEAST_STEPS, -(-steps // 4))
    before = training.snapshot()
    windows: list[TimedWindow] = []
    for _ in range(ROUNDS):
        with training.without_gradient_sync():
            stepper.window("alone", 1)  # this step still broadcasts buffers: not kept
            windows.append(stepper.window("alone", count))
        training.restore(before)
        stepper.window("together", 1)  # nor does this step broadcast them
        windows.append(stepper.window("together", count))
    timers = read_ddp_timers(training.model, lambda: stepper.window("together", 1))
    training.restore(before)
    return windows, timers


def read_ddp_timers(model: nn.Module, step: Callable[[], object]) -> dict[str, float]:
    """Return medians over a few steps of DDP's own timers, in seconds; empty if DDP records none, or is not used.

    Communication is the span from the first bucket that is ready to the last that is reduced; the part of it after
    the end of backward's computation is exposed (torch/csrc/distributed/c10d/logger.cpp).
    """
    if not isinstance(model, DistributedDataParallel):  # a strategy of the user's own
        return {}
    model._set_ddp_runtime_logging_sample_rate(1)
    spans: list[tuple[float, float]] = []
    for _ in range(LOGGED_STEPS):
        step()
        data = model._get_ddp_logging_data()
        span = data.get("backward_comm_time", 0)
        spans.append((span / 1e9, max(0, span - data.get("backward_compute_comm_overlap_time", 0)) / 1e9))
    model._set_ddp_runtime_logging_sample_rate(100)
    if not any(span for span, _ in spans):
        return {}
    return {
        "ddp_communication_s": statistics.median(span for span, _ in spans),
        "ddp_exposed_s": statistics.median(exposed for _, exposed in spans),
    }
