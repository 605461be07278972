"""What ddp's gradient exchange costs, by taking it away: windows with and without it, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from harness.measure.stepper import Stepper, Stretch

ROUNDS = 2
LEAST_STEPS = 5
LOGGED_STEPS = 5


def measure_communication(stepper: Stepper, steps: int) -> tuple[list[Stretch], Mapping[str, Any]]:
    """Windows of a quarter of ``steps`` in turn: all ranks together, each rank alone; then what DDP itself says.

    Alone no rank waits for another, so a rank's own time shows. Parameters, buffers and optimizer state are as
    before afterwards.
    """
    training = stepper.training
    count = max(LEAST_STEPS, -(-steps // 4))
    before = training.snapshot()
    stretches: list[Stretch] = []
    for _ in range(ROUNDS):
        with training.alone():
            stepper.window("alone", 1)  # the first step alone still sends buffers: it is not kept
            stretches.append(stepper.window("alone", count))
        training.restore(before)
        stepper.window("together", 1)  # nor does the first one together send them
        stretches.append(stepper.window("together", count))
    told = ddp_says(training.model, lambda: stepper.window("together", 1))
    training.restore(before)
    return stretches, told


def ddp_says(model: Any, step: Callable[[], Any]) -> dict[str, float]:
    """Medians over a few steps of DDP's own clocks, in seconds; empty where it tells nothing.

    Communication is the span from the first bucket that is ready to the last that is reduced; what of it lies
    after the end of backward's computing is exposed (torch/csrc/distributed/c10d/logger.cpp).
    """
    model._set_ddp_runtime_logging_sample_rate(1)
    spans: list[tuple[float, float]] = []
    for _ in range(LOGGED_STEPS):
        step()
        told = model._get_ddp_logging_data()
        span = told.get("backward_comm_time", 0)
        spans.append((span / 1e9, max(0, span - told.get("backward_compute_comm_overlap_time", 0)) / 1e9))
    model._set_ddp_runtime_logging_sample_rate(100)
    if not any(span for span, _ in spans):
        return {}
    return {
        "ddp_communication_s": statistics.median(span for span, _ in spans),
        "ddp_exposed_s": statistics.median(exposed for _, exposed in spans),
    }
