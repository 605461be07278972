"""Text of the preview: time, device-hours, cost and energy by part, estimated before a run and as they were."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd

from harness.analysis.durations import CELL, COMMAND, REPORT, TRAINING, EarlierRun
from harness.analysis.preview import MEASUREMENT, TOTAL, Saving, total_seconds
from harness.config.sections import Cost
from harness.plan.feasibility import HOUR_S, end_of
from harness.plan.inventory import device_of_driver
from harness.plan.planner import Plan
from harness.record.estimate import Estimate, read_estimate
from harness.record.folder import RunFolder
from harness.report.row import Row, Scalar, is_missing, number, plural, rows_of
from harness.report.tables.text import Column, TextTable, duration, first_of, flush_right, make_table, percent, words

SUMS = (MEASUREMENT, TOTAL)
OUTSIDE = {COMMAND: "the start of Ray", REPORT: "the report"}
UNKNOWN = (
    "needs an earlier run of these cells; one of 1 epoch and 1 seed is enough, and --like RUN_FOLDER names another"
)


def amount(value: Scalar) -> str:
    """Return device-hours, kilowatt-hours or money: at least three digits, at most four decimal places."""
    if is_missing(value):
        return "-"
    found = number(value)
    return f"{found:,.0f}" if found >= 100 or not found else f"{found:.3g}" if found >= 0.1 else f"{found:.4f}"


def preview_table(preview: pd.DataFrame) -> TextTable:
    """Return each part with its time, device-hours, cost and energy: estimated, and actual if there was a run."""
    ran = bool(preview["actual_s"].notna().any())
    before = ", estimated" if ran else ""

    def both(title: str, name: str) -> list[Column]:
        estimated: Column = (f"{title}{before}", f"estimated_{name}", amount)
        return [estimated, (title, f"actual_{name}", amount)] if ran else [estimated]

    columns = (
        ("part", "label", words),
        ("trials", _trials, flush_right),
        (f"time{before}", _estimated, flush_right),
        *((("time", "actual_s", duration), ("error", "error", _signed)) if ran else ()),
        *both("device-hours", "device_hours"),
        *both("in use", "busy_device_hours"),
        *both(next(iter(preview["currency"].dropna()), "cost"), "cost"),
        *both("kWh", "energy_kwh"),
        ("memory", "fits", words),
    )
    return make_table(columns, rows_of(preview), lambda row: "base" if row.part in SUMS else "", ordered=True)


def _trials(row: Row) -> str:
    """Return '3', or '2 of 3' if not all planned trials were started."""
    planned, started = row.planned_trials, row.measured_trials
    if is_missing(planned) or is_missing(started) or planned == started:
        found = started if is_missing(planned) else planned
        return "" if is_missing(found) or not found else f"{found:.0f}"
    return f"{started:.0f} of {planned:.0f}"


def _estimated(row: Row) -> str:
    if is_missing(row.estimated_s):
        return words(row.basis)
    return f"{'at least ' if row.basis == 'lower bound' else ''}{duration(row.estimated_s)}"


def _signed(value: Scalar) -> str:
    return "-" if is_missing(value) else f"{'+' if number(value) > 0 else ''}{percent(value)}"


def grade_line(preview: pd.DataFrame) -> str:
    """Return a sentence on the estimate of a run beside what it took; empty if there was no estimate, or no run."""
    sums = [row for row in rows_of(preview) if row.part in SUMS and not is_missing(row.actual_s)]
    if not sums or is_missing(sums[-1]["estimated_s"]):
        return ""
    row = next((row for row in reversed(sums) if row.basis == "earlier run"), sums[-1])
    until = "" if row.part == TOTAL else " until the report"
    error = "" if is_missing(row.error) else f" ({_signed(row.error)})"
    without = ", without the parts of unknown time" if row.basis == "unknown" else ""
    took = f"Estimated before the run: {_estimated(row)}{until}{without}{error}; it took {duration(row.actual_s)}"
    if is_missing(row.actual_device_hours):
        return f"{took}."
    device_hours = [amount(row[f"{side}_device_hours"]) for side in ("estimated", "actual")]
    return f"{took}. Device-hours: {device_hours[0]} estimated, {device_hours[1]} used."


def preview_lines(
    plan: Plan,
    estimate: Estimate,
    earlier: EarlierRun | None,
    smaller: Sequence[Saving],
    spent_device_s: float = 0.0,
) -> list[str]:
    """Return the sentences below the table of a preview; ``spent_device_s``: the device-seconds of a run to resume."""
    cost, seconds = plan.experiment.cost, total_seconds(estimate)
    lines = [total_line(plan, estimate)]
    end = end_of(plan.experiment, plan.machine.devices, spent_device_s)
    if end and end.seconds <= 0:
        lines.append(f"{end.name} was reached by the earlier invocations: every trial that is left is skipped.")
    elif end and seconds > end.seconds:
        lines.append(
            f"{end.name} ends the run after {duration(end.seconds)}: trials that are left by then are skipped."
        )
    lines.append(source_line(plan, earlier))
    lacking = [p["label"] for p in estimate["parts"] if p["basis"] == "lower bound" and p["part"] == CELL]
    if earlier and lacking:
        lines.append(f"Not in it, so at least: {first_of(lacking, 8)}.")
    if any(part["basis"] == "unknown" and part["part"] == TRAINING for part in estimate["parts"]):
        lines.append(f"Convergence: unknown, {UNKNOWN}.")
    devices, at_once = estimate["devices"], estimate["at_once"]
    if 0 < at_once < devices:
        least = _spent(seconds, at_once, cost)
        lines.append(
            f"At most {at_once} of the {devices} devices work at once; on {at_once} alone the run takes {least}."
        )
    if each := [f"{one.what}: {duration(one.seconds)}, {_spent(one.seconds, devices, cost)}" for one in smaller]:
        lines.append(f"A smaller study saves {estimate['bound']}: {'; '.join(each)}.")
    return lines


def total_line(plan: Plan, estimate: Estimate) -> str:
    """Return 'Takes about 3 min 10 s: 0.105 device-hours of 2 devices, 0.26 USD.'.

    With the parts whose time is unknown: 'the convergence of 4 cells' and the like.
    """
    seconds, devices = total_seconds(estimate), estimate["devices"]
    parts = [part["part"] for part in estimate["parts"] if part["basis"] == "unknown"]
    cells = parts.count(TRAINING)
    unknown = [f"the convergence of {plural(cells, 'cell')}"] if cells else []
    unknown += [OUTSIDE[part] for part in parts if part != TRAINING]
    without = f", and {', '.join(unknown)}, of unknown time" if unknown else ""
    spent = _spent(seconds, devices, plan.experiment.cost)
    return f"Takes {estimate['bound']} {duration(seconds)}: {spent} of {plural(devices, 'device')}{without}."


def _spent(seconds: float, devices: int, cost: Cost | None) -> str:
    """Return '0.105 device-hours, 0.26 USD' for these seconds of some devices."""
    device_hours = seconds * devices / HOUR_S
    price = f", {amount(device_hours * cost.per_device_hour)} {cost.currency}" if cost else ""
    return f"{amount(device_hours)} device-hours{price}"


def source_line(plan: Plan, earlier: EarlierRun | None) -> str:
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
    source = f"from {estimate['earlier']}" if estimate and estimate["earlier"] else "without an earlier run, the least"
    estimated = f"The estimate was recorded before the run, {source}. " if estimate else "There was no estimate. "
    return (
        f"{estimated}Device-hours: all devices of the machine, working or not; in use: those that trials occupied. The "
        "report's own time is known once it is written: in tables/preview.csv, and in a report that is made anew."
    )
