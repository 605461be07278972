"""Text of the preview: time, device-hours, cost and energy by part, estimated before a run and as they were."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd

from harness.analysis.durations import CELL, COMMAND, REPORT, TRAINING, EarlierRun
from harness.analysis.preview import MEASUREMENT, TOTAL, Saving, total_seconds
from harness.config.sections import Cost
from harness.plan.budget import HOUR_S, end_of
from harness.plan.inventory import device_of_driver
from harness.plan.planner import Plan
from harness.record.estimate import Estimate, read_estimate
from harness.record.folder import RunFolder
from harness.report.labels import Row, Scalar, is_missing, number, plural, rows_of
from harness.report.tables.text import Column, TextTable, duration, flush_right, make_table, percent, words

SUMS = (MEASUREMENT, TOTAL)


def amount(value: Scalar) -> str:
    """Return device-hours, kilowatt-hours or money: at least three digits, at most four decimal places."""
    if is_missing(value):
        return "-"
    found = number(value)
    return f"{found:,.0f}" if found >= 100 or not found else f"{found:.3g}" if found >= 0.1 else f"{found:.4f}"


def preview_table(preview: pd.DataFrame) -> TextTable:
    """Return each part with its time, device-hours, cost and energy: estimated, and actual if there was a run."""
    ran = bool(preview["actual_s"].notna().any())
    before, after = (", estimated", "") if ran else ("", "")
    columns: tuple[Column, ...] = (
        ("part", "label", words),
        ("trials", _trials, flush_right),
        (f"time{before}", _estimated, flush_right),
        *(((f"time{after}", "actual_s", duration), ("error", "error", _signed)) if ran else ()),
        *_both("device-hours", "device_hours", ran=ran),
        *_both("in use", "busy_device_hours", ran=ran),
        *_both(_money(preview), "cost", ran=ran),
        *_both("kWh", "energy_kwh", ran=ran),
        ("memory", "fits", words),
    )
    return make_table(columns, rows_of(preview), lambda row: "base" if row["part"] in SUMS else "", ordered=True)


def _both(title: str, name: str, *, ran: bool) -> tuple[Column, ...]:
    before: Column = (f"{title}, estimated" if ran else title, f"estimated_{name}", amount)
    return (before, (title, f"actual_{name}", amount)) if ran else (before,)


def _money(preview: pd.DataFrame) -> str:
    known = preview["currency"].dropna()
    return str(known.iloc[0]) if len(known) else "cost"


def _trials(row: Row) -> str:
    """Return '3', or '2 of 3' if not all planned trials were started."""
    planned, started = row["planned_trials"], row["measured_trials"]
    if is_missing(planned) or is_missing(started) or planned == started:
        found = started if is_missing(planned) else planned
        return "" if is_missing(found) or not number(found) else f"{number(found):.0f}"
    return f"{number(started):.0f} of {number(planned):.0f}"


def _estimated(row: Row) -> str:
    if is_missing(row["estimated_s"]):
        return words(row["basis"])
    return f"{'at least ' if row['basis'] == 'lower bound' else ''}{duration(row['estimated_s'])}"


def _signed(value: Scalar) -> str:
    return "-" if is_missing(value) else f"{'+' if number(value) > 0 else ''}{percent(value)}"


def grade_line(preview: pd.DataFrame) -> str:
    """Return a sentence on the estimate of a run beside what it took; empty if there was no estimate, or no run."""
    sums = [row for row in rows_of(preview) if row["part"] in SUMS and not is_missing(row["actual_s"])]
    if not sums or is_missing(sums[-1]["estimated_s"]):
        return ""
    row = next((row for row in reversed(sums) if row["basis"] == "earlier run"), sums[-1])
    until = "" if row["part"] == TOTAL else " until the report"
    error = "" if is_missing(row["error"]) else f" ({_signed(row['error'])})"
    without = ", without the parts of unknown time" if row["basis"] == "unknown" else ""
    took = f"Estimated before the run: {_estimated(row)}{until}{without}{error}; it took {duration(row['actual_s'])}"
    if is_missing(row["actual_device_hours"]):
        return f"{took}."
    device_hours = [amount(row[f"{side}_device_hours"]) for side in ("estimated", "actual")]
    return f"{took}. Device-hours: {device_hours[0]} estimated, {device_hours[1]} used."


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
