"""The explanation of a trial's time, measured after its timed windows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.measure.collectives import measure_collectives, measure_communication
from harness.measure.flops import count_flops, first_samples
from harness.measure.matmul_peak import measured_peak
from harness.measure.stepper import Stepper, TimedWindow
from harness.measure.throughput import ThroughputMeasurement
from harness.plan.cell import Cell
from harness.plan.rows import TrialFacts
from harness.train.workloads import Workload

STATIC_GRAPH = "its communication cannot be taken away: with static_graph DDP has no step without exchange"
FLOPS_SAMPLES = 2
PROBE_S = 0.1


@dataclass(frozen=True)
class Explanation:
    """Further windows of one rank, and columns that the trial's row gains; FLOPs and peaks are rank 0's."""

    windows: tuple[TimedWindow, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def explain(
    cell: Cell, stepper: Stepper, speed: ThroughputMeasurement, workload: Workload, cache: dict[Hashable, Any]
) -> Explanation:
    """Measure what the timed windows do not show: communication, collectives, FLOPs and the device's peak."""
    windows: list[TimedWindow] = []
    facts: dict[str, Any] = {}
    if cell.traits.explained_by == "removal" and stepper.ranks.world_size > 1:
        if cell.strategy_options.get("static_graph"):
            facts["explain_error"] = STATIC_GRAPH
        else:
            windows, ddp_facts = measure_communication(stepper, speed.window_steps)
            facts |= ddp_facts
    # a wrapper in one process has no collectives on one device
    if cell.traits.explained_by == "profile" and (cell.devices > 1 or not cell.traits.one_process):
        facts |= measure_collectives(cell.traits, stepper)
    if stepper.ranks.first:
        facts |= _arithmetic(cell, stepper, workload, cache)
    return Explanation(tuple(windows), facts)


def _peak(device: torch.device, precision: str) -> float | None:
    """Return the measured peak in FLOP/s; None if there is no memory for the probe."""
    try:
        return measured_peak(device, precision, seconds=PROBE_S)
    except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
        return None


def _arithmetic(cell: Cell, stepper: Stepper, workload: Workload, cache: dict[Hashable, Any]) -> TrialFacts:
    """Return the model's FLOPs and the device's peak, each measured once a process for a model and a precision."""
    device = stepper.ranks.devices[0]
    model = ("flops", cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items())))
    if model not in cache:
        batch = first_samples(stepper.one_batch(), FLOPS_SAMPLES)
        cache[model] = count_flops(workload, batch, device)
    peak = ("peak", cell.precision)
    if peak not in cache:
        cache[peak] = _peak(device, cell.precision)
    return {
        "flops_per_unit": cache[model].per_unit,
        "flops_reason": cache[model].reason,
        "measured_peak_flops_per_s": cache[peak],
    }
