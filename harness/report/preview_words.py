"""Sentences on the estimate of a plan: its source, wall time, device-hours and cost, idle devices, smaller studies."""

from __future__ import annotations

import time
from collections.abc import Sequence

from harness.analysis.earlier_run import EarlierRun
from harness.analysis.preview import Saving, total_seconds
from harness.analysis.time_use import CELL, COMMAND, REPORT, TRAINING
from harness.config.cost import Cost
from harness.plan.budget import HOUR_S, end_of
from harness.plan.devices import device_of_driver
from harness.plan.planner import Plan
from harness.record.estimate import Estimate, read_estimate
from harness.record.folder import RunFolder
from harness.report.tables.preview import amount
from harness.report.tables.text import duration, plural

OUTSIDE = {COMMAND: "the start of Ray", REPORT: "the report"}
UNKNOWN = (
    "needs an earlier run of these cells; one of 1 epoch and 1 seed is enough, and --like RUN_FOLDER names another"
)


def preview_lines(
    plan: Plan,
    estimate: Estimate,
    earlier: EarlierRun | None,
    smaller: Sequence[Saving],
    spent_device_s: float = 0.0,
) -> list[str]:
    """Return the sentences below the table of a preview; ``spent_device_s``: the device-seconds of a run to resume."""
    cost = plan.experiment.cost
    return [
        total_line(plan, estimate),
        *_limit_line(plan, estimate, spent_device_s),
        *_source_lines(plan, estimate, earlier),
        *_idle_line(estimate, cost),
        *_smaller_lines(estimate, smaller, cost),
    ]


def total_line(plan: Plan, estimate: Estimate) -> str:
    """Return 'Takes about 3 min 10 s: 0.105 device-hours of 2 devices, 0.26 USD.'."""
    seconds, unknown = total_seconds(estimate), _unknown(estimate)
    without = f", and {', '.join(unknown)}, of unknown time" if unknown else ""
    spent = _spent(seconds, estimate, plan.experiment.cost)
    return (
        f"Takes {estimate['bound']} {duration(seconds)}: {spent} of {plural(estimate['devices'], 'device')}{without}."
    )


def _spent(seconds: float, estimate: Estimate, cost: Cost | None) -> str:
    """Return '0.105 device-hours, 0.26 USD' for these seconds of the whole machine."""
    device_hours = seconds * estimate["devices"] / HOUR_S
    price = f", {amount(device_hours * cost.per_device_hour)} {cost.currency}" if cost else ""
    return f"{amount(device_hours)} device-hours{price}"


def _unknown(estimate: Estimate) -> list[str]:
    """Return 'the convergence of 4 cells' and the like, whose time is unknown."""
    unknown = [part for part in estimate["parts"] if part["basis"] == "unknown"]
    cells = sum(part["part"] == TRAINING for part in unknown)
    rest = [OUTSIDE[part["part"]] for part in unknown if part["part"] != TRAINING]
    return [*([f"the convergence of {plural(cells, 'cell')}"] if cells else []), *rest]


def _limit_line(plan: Plan, estimate: Estimate, spent_device_s: float) -> list[str]:
    end = end_of(plan.experiment, plan.machine.devices, spent_device_s)
    if end is None or total_seconds(estimate) <= end.seconds:
        return []
    if end.seconds <= 0:
        return [f"{end.name} was reached by the earlier invocations: every trial that is left is skipped."]
    return [f"{end.name} ends the run after {duration(end.seconds)}: trials that are left by then are skipped."]


def source_line(plan: Plan, earlier: EarlierRun | None) -> str:
    """Return what an estimate is from, and whether that was measured on other devices."""
    if earlier is None:
        return (
            "No earlier run of these cells was found: the time is the least that windows and starts of processes take."
        )
    models = ", ".join(earlier.hardware) or "unknown hardware"
    day = "" if earlier.started_at is None else time.strftime(" of %Y-%m-%d", time.localtime(earlier.started_at))
    return f"Estimated from {earlier.path}{day}, on {models}.{_other_devices(plan, earlier)}"


def _source_lines(plan: Plan, estimate: Estimate, earlier: EarlierRun | None) -> list[str]:
    """Return what the estimate is from, and the cells that it lacks."""
    lines = [source_line(plan, earlier)]
    if earlier:
        lacking = [p["label"] for p in estimate["parts"] if p["basis"] == "lower bound" and p["part"] == CELL]
        if lacking:
            lines.append(f"Not in it, so at least: {'; '.join(lacking[:8])}{'; ...' * (len(lacking) > 8)}.")
    if any(part["basis"] == "unknown" and part["part"] == TRAINING for part in estimate["parts"]):
        lines.append(f"Convergence: unknown, {UNKNOWN}.")
    return lines


def _other_devices(plan: Plan, earlier: EarlierRun) -> str:
    """Return a sentence if the earlier run's devices are other than those of the plan."""
    planned = {node.gpu_model for node in plan.inventory.nodes if node.gpu_model}
    known = {known.name for model in earlier.hardware if (known := device_of_driver(model))}
    if not planned or planned & {*earlier.hardware, *known}:
        return ""
    return f" The times are those of that hardware, not of {', '.join(sorted(planned))}."


def _idle_line(estimate: Estimate, cost: Cost | None) -> list[str]:
    """Return how many devices never work at once, and what the same run takes on those that do."""
    devices, at_once = estimate["devices"], estimate["at_once"]
    if at_once >= devices or not at_once:
        return []
    least = _spent(total_seconds(estimate), {**estimate, "devices": at_once}, cost)
    return [f"At most {at_once} of the {devices} devices work at once; on {at_once} alone the run takes {least}."]


def _smaller_lines(estimate: Estimate, smaller: Sequence[Saving], cost: Cost | None) -> list[str]:
    each = [f"{one.what}: {duration(one.seconds)}, {_spent(one.seconds, estimate, cost)}" for one in smaller]
    return [f"A smaller study saves {estimate['bound']}: {'; '.join(each)}."] if each else []


def preview_words(folder: RunFolder) -> str:
    """Return the sentence above the table of estimated and actual time."""
    estimate = read_estimate(folder)
    source = f"from {estimate['earlier']}" if estimate and estimate["earlier"] else "without an earlier run, the least"
    estimated = f"The estimate was recorded before the run, {source}. " if estimate else "There was no estimate. "
    return (
        f"{estimated}Device-hours: all devices of the machine, working or not; in use: those that trials occupied. The "
        "report's own time is known once it is written: in tables/preview.csv, and in a report that is made anew."
    )
