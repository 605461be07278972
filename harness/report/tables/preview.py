"""Text of the preview: time, device-hours, cost and energy by part, estimated before a run and as they were."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from harness.analysis.durations import TimedRun
from harness.analysis.preview import CELL, COMMAND, MEASUREMENT, REPORT, TOTAL, TRAINING
from harness.config.known_hardware import device_of_driver
from harness.config.sections import Cost
from harness.plan.feasibility import HOUR_S, end_of
from harness.plan.planner import Plan
from harness.record.estimate import Estimate, read_estimate
from harness.record.folder import RunFolder
from harness.report.row import Row, Scalar, is_missing, number, plural, rows_of
from harness.report.tables.text import TextTable, duration, first_of, flush_right, make_table, or_dash, percent, words

OUTSIDE = {COMMAND: "the start of Ray", REPORT: "the report"}


@or_dash
def amount(found: float) -> str:
    """Return device-hours, kilowatt-hours or money: at least three digits, at most four decimal places."""
    return f"{found:,.0f}" if found >= 100 or not found else f"{found:.3g}" if found >= 0.1 else f"{found:.4f}"


def preview_table(
    preview: pd.DataFrame, cost: Cost | None, fits: Mapping[str, str] = MappingProxyType({})
) -> TextTable:
    """Return each part with its time, device-hours, cost and energy: as it was and, if there was no run, as estimated.

    ``fits``: whether cells fit into memory, by their id.
    """
    ran = bool(preview["actual_s"].notna().any())

    def price(row: Row) -> Scalar:
        return None if cost is None or is_missing(row.device_hours) else row.device_hours * cost.per_device_hour

    columns = (
        ("part", "label", words),
        ("trials", _trials, flush_right),
        ("time, estimated" if ran else "time", _estimated, flush_right),
        ("time", "actual_s", duration),
        ("error", "error", _signed),
        ("device-hours", "device_hours", amount),
        ("in use", "busy_device_hours", amount),
        (cost.currency if cost else "cost", price, amount),
        ("kWh", "energy_kwh", amount),
        ("memory", lambda row: fits.get(str(row.cell_id)), words),
    )
    return make_table(
        columns, rows_of(preview), lambda row: "base" if row.part in (MEASUREMENT, TOTAL) else "", ordered=True
    )


def _trials(row: Row) -> str:
    """Return '3', or '2 of 3' if not all planned trials were started."""
    planned, started = row.planned_trials, row.measured_trials
    if planned is None or started is None or planned == started:
        return str(planned or started or "")
    return f"{started} of {planned}"


def _estimated(row: Row) -> str:
    if is_missing(row.estimated_s):
        return words(row.basis)
    counts = (row.measured_trials, row.planned_trials)
    skips = not any(map(is_missing, counts)) and number(counts[0]) < number(counts[1])  # as with blocks: decide
    return f"{'at least ' if row.basis == 'lower bound' and not skips else ''}{duration(row.estimated_s)}"


@or_dash
def _signed(share: float) -> str:
    return f"{'+' if share > 0 else ''}{percent(share)}"


def grade_line(preview: pd.DataFrame) -> str:
    """Return a sentence on the estimate of a run beside what it took; empty if there was no estimate, or no run."""
    row = next((row for row in rows_of(preview) if row.part == MEASUREMENT), None)
    if row is None or not row.actual_s or row.estimated_s is None:
        return ""
    error = "" if is_missing(row.error) else f" ({_signed(row.error)})"
    without = ", without the parts of unknown time" if row.basis == "unknown" else ""
    expected = row.device_hours * row.estimated_s / row.actual_s
    return (
        f"Estimated before the run: {_estimated(row)} until the report{without}{error}; it took "
        f"{duration(row.actual_s)}. Device-hours: {amount(expected)} estimated, {amount(row.device_hours)} used."
    )


def preview_lines(
    plan: Plan, estimate: Estimate, earlier: TimedRun | None, smaller: Mapping[str, float], spent_device_s: float = 0.0
) -> list[str]:
    """Return the sentences below the table of a preview.

    ``smaller``: the seconds that smaller studies save; ``spent_device_s``: the device-seconds of a run to resume.
    """
    cost, seconds, devices = plan.experiment.cost, estimate.seconds, estimate.devices
    lines = [total_line(plan, estimate)]
    end = end_of(plan.experiment, plan.machine.devices, spent_device_s)
    if end and end.seconds <= 0:
        lines.append(f"{end.name} was reached by the earlier invocations: every trial that is left is skipped.")
    elif end and seconds > end.seconds:
        lines.append(
            f"{end.name} ends the run after {duration(end.seconds)}: trials that are left by then are skipped."
        )
    lines.append(source_line(plan, earlier))
    lacking = [part.label for part in estimate.parts if part.basis == "lower bound" and part.part == CELL]
    if earlier and lacking:
        lines.append(f"Not in it, so at least: {first_of(lacking, 8)}.")
    if any(part.basis == "unknown" and part.part == TRAINING for part in estimate.parts):
        settings = plan.experiment.convergence
        least = "1 epoch and 1 seed" if settings and settings.epochs else "1 seed"
        lines.append(
            f"Convergence: unknown, needs an earlier run of these cells; one of {least} is enough, and "
            "--like RUN_FOLDER names another."
        )
    if 0 < estimate.at_once < devices:
        lines.append(
            f"At most {estimate.at_once} of the {devices} devices work at once; on {estimate.at_once} alone the run "
            f"takes {_spent(seconds, estimate.at_once, cost)}."
        )
    if smaller:
        each = [f"{what}: {duration(saved_s)}, {_spent(saved_s, devices, cost)}" for what, saved_s in smaller.items()]
        lines.append(f"A smaller study saves {estimate.bound}: {'; '.join(each)}.")
    return lines


def total_line(plan: Plan, estimate: Estimate) -> str:
    """Return 'Takes about 3 min 10 s: 0.105 device-hours of 2 devices, 0.26 USD.'.

    With the parts whose time is unknown: 'the convergence of 4 cells' and the like.
    """
    parts = [part.part for part in estimate.parts if part.basis == "unknown"]
    cells = parts.count(TRAINING)
    unknown = [f"the convergence of {plural(cells, 'cell')}"] if cells else []
    unknown += [OUTSIDE[part] for part in parts if part != TRAINING]
    without = f", and {', '.join(unknown)}, of unknown time" if unknown else ""
    spent = _spent(estimate.seconds, estimate.devices, plan.experiment.cost)
    devices = plural(estimate.devices, "device")
    return f"Takes {estimate.bound} {duration(estimate.seconds)}: {spent} of {devices}{without}."


def _spent(seconds: float, devices: int, cost: Cost | None) -> str:
    """Return '0.105 device-hours, 0.26 USD' for these seconds of some devices."""
    device_hours = seconds * devices / HOUR_S
    price = f", {amount(device_hours * cost.per_device_hour)} {cost.currency}" if cost else ""
    return f"{amount(device_hours)} device-hours{price}"


def source_line(plan: Plan, earlier: TimedRun | None) -> str:
    """Return what an estimate is from, and whether that was measured on other devices."""
    if earlier is None:
        return (
            "No earlier run of these cells was found: the time is the least that windows and starts of processes take."
        )
    models = ", ".join(earlier.hardware) or "unknown hardware"
    day = "" if earlier.started_at is None else time.strftime(" of %Y-%m-%d", time.localtime(earlier.started_at))
    planned = {node.gpu_model for node in plan.inventory.nodes if node.gpu_model}
    known = {known.name for model in earlier.hardware if (known := device_of_driver(model))}
    differs = planned and not planned & {*earlier.hardware, *known}
    other = f" The times are those of that hardware, not of {', '.join(sorted(planned))}." if differs else ""
    return f"Estimated from {earlier.path}{day}, on {models}.{other}"


def preview_words(folder: RunFolder) -> str:
    """Return the sentence above the table of estimated and actual time."""
    estimate = read_estimate(folder)
    source = f"from {estimate.earlier}" if estimate and estimate.earlier else "without an earlier run, the least"
    estimated = f"The estimate was recorded before the run, {source}. " if estimate else "There was no estimate. "
    return (
        f"{estimated}Device-hours: all devices of the machine, working or not; in use: those that trials occupied. The "
        "report's own time is known once it is written: in a report that is made anew."
    )
