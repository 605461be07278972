"""The cost of exchanging gradients and parameters: profiled collectives, windows with and without exchange."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from harness.config.strategy_traits import StrategyTraits
from harness.measure.exposure import CollectiveTime, Event, collective_times, events_of
from harness.measure.stepper import Stepper, TimedWindow
from harness.measure.window import synchronize
from harness.plan.rows import TrialFacts

FIRST_STEPS, PROFILED_STEPS = 3, 5
"""Steps before the profile, which allocate buffers and connect the ranks, and those of the profile."""
NO_KERNELS = "the profile has no kernel of a GPU: CUPTI is not permitted or not there, so collectives are not known"


def measure_collectives(traits: StrategyTraits, stepper: Stepper) -> dict[str, Any]:
    """Return seconds a step of each collective, total and exposed, from a few profiled steps; None if not seen.

    Those of the rank that waits least for its collectives: the others wait for it, which is no cost of exchange.
    """
    device = stepper.ranks.devices[0]
    for _ in range(FIRST_STEPS):
        stepper.step()
    events = _profiled(stepper)
    by_rank = stepper.ranks.gather(collective_times(events, traits.profiled_parts, device))
    waiting = [part.column for part in traits.profiled_parts if part.waits]
    least = min(by_rank, key=lambda times: _exposed_s([times[column] for column in waiting]))
    facts: dict[str, Any] = {}
    for part in traits.profiled_parts:
        time = least[part.column]
        facts[part.column] = time and time.total_s / PROFILED_STEPS
        facts[part.exposed_column] = time and time.exposed_s / PROFILED_STEPS
    unseen = device.type == "cuda" and all(event.gpu is None for event in events)
    return facts | ({"explain_error": NO_KERNELS} if unseen else {})


def _profiled(stepper: Stepper) -> list[Event]:
    devices = stepper.ranks.devices
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if devices[0].type == "cuda" else [])]
    stepper.ranks.barrier()
    synchronize(devices)
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            stepper.step()
        synchronize(devices)
    return events_of(profiler)


def _exposed_s(times: Sequence[CollectiveTime | None]) -> float:
    return sum(time.exposed_s for time in times if time) or float("inf")


ROUNDS = 2
LEAST_STEPS = 5
LOGGED_STEPS = 5


def measure_alone(stepper: Stepper, steps: int, *, detailed: bool) -> list[TimedWindow]:
    """Measure a window of half of ``steps`` without exchange, after which the training is of no further use."""
    with stepper.training.without_exchange():
        stepper.window("alone", 1, detailed=detailed)  # fsdp gathers its parameters once more: not kept
        return [stepper.window("alone", ROUNDS * _count(steps), detailed=detailed)]


def measure_communication(stepper: Stepper, steps: int, *, detailed: bool) -> tuple[list[TimedWindow], TrialFacts]:
    """Measure windows of a quarter of ``steps``, in turn without and with gradient exchange, and read DDP's own timers.

    Without exchange no rank waits for another, so the window shows the rank's own time. Parameters, buffers and
    optimizer state are restored. ``detailed``: as in the timed windows, with which they are compared.
    """
    training = stepper.training
    count = _count(steps)
    before = training.snapshot()
    windows: list[TimedWindow] = []
    for _ in range(ROUNDS):
        with training.without_exchange():
            stepper.window("alone", 1, detailed=detailed)  # this step still broadcasts buffers: not kept
            windows.append(stepper.window("alone", count, detailed=detailed))
        training.restore(before)
        stepper.window("together", 1, detailed=detailed)  # nor does this step broadcast them
        windows.append(stepper.window("together", count, detailed=detailed))
    timers = read_ddp_timers(training.model, lambda: stepper.window("together", 1))
    training.restore(before)
    return windows, timers


def _count(steps: int) -> int:
    return max(LEAST_STEPS, -(-steps // 4))


def read_ddp_timers(model: nn.Module, step: Callable[[], object]) -> TrialFacts:
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
