"""The plan as a table and lines of text, for the console."""

from __future__ import annotations

from rich import box
from rich.table import Table

from harness.plan.cell import Cell, format_gpu_ids
from harness.plan.planner import Plan
from harness.plan.trial import Trial, WorkerGroup
from harness.report.tables.text import duration, plural

WHY = {
    "twin": "for the noise floor (A/A test of the base)",
    "explain": "for the losses of efficiency",
    "profile": "for the collectives (profiles)",
    "equivalence": "for the equivalence of strategies",
    "doctor": "for the doctor, each the first trial of its worker group",
    "links": "for the bandwidth of links and collectives",
}


def plan_table(plan: Plan) -> Table:
    """Return the number of cells, and of trials of each kind, by strategy, devices and workers."""
    table = Table(
        title=f"Plan of {plan.experiment.name}: cells, and trials of each kind",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("strategy", "devices", "workers", "cells", "throughput", "convergence", "diagnostic"):
        text = heading in ("strategy", "workers")
        table.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    by_key: dict[tuple[str, int, str], list[Trial]] = {}
    for group in plan.groups:
        for trial in group.trials:
            key = (trial.cell.strategy, trial.cell.devices, _workers(group))
            by_key.setdefault(key, []).append(trial)
    for (strategy, devices, workers), trials in sorted(by_key.items()):
        kinds = [trial.kind for trial in trials]
        cells = len({trial.cell for trial in trials})
        numbers = (kinds.count(kind) for kind in ("throughput", "convergence", "diagnostic"))
        table.add_row(strategy, str(devices), workers, str(cells), *map(str, numbers))
    return table


def _workers(group: WorkerGroup) -> str:
    """Return '2', '8 on 2 nodes' or '1, torchrun': the processes of a worker group, and what is not the default."""
    placement = group.placement
    nodes = f" on {placement.nodes} nodes" if placement.nodes > 1 else ""
    gpus = f" on GPU {format_gpu_ids(placement.device_ids)}" if placement.device_ids else ""
    launcher = f", {group.launcher}" if group.launcher != "ray" else ""
    return f"{placement.workers}{nodes}{gpus}{launcher}"


def plan_lines(plan: Plan) -> list[str]:
    """Return the rest of the plan as text: the machine, the order, reasons of skipped cells, the shortest time."""
    machine = plan.machine
    kind = "GPUs" if machine.device == "cuda" else "CPU slots"
    lines = [
        f"On {plan.inventory}: {machine.devices} {kind}, {plural(machine.threads_per_device, 'thread')} each.",
        f"{plural(len(plan.trials), 'trial')} in {plural(plan.blocks, 'block')}, "
        f"{plural(len(plan.groups), 'worker group')} of fresh processes; "
        f"random order from seed {plan.experiment.seed}.",
    ]
    added = {trial.cell for trial in plan.trials if trial.added and trial.kind != "diagnostic"}
    if added:
        lines.append(f"{plural(len(added), 'cell')} added as the base of ratios.")
    purposes = [trial.purpose for trial in plan.trials if trial.purpose]
    if purposes:
        what = "; ".join(f"{purposes.count(purpose)} {WHY[purpose]}" for purpose in dict.fromkeys(purposes))
        lines.append(f"Diagnostic trials: {what}.")
    reasons: dict[str, set[Cell]] = {}
    for skip in plan.skips:
        reasons.setdefault(skip.reason, set()).add(skip.trial.cell)
    for reason, cells in reasons.items():
        lines.append(f"  skipped {plural(len(cells), 'cell')}: {reason}")
    if plan.trials:
        lines += _convergence_line(plan)
        lines.append(f"Takes at least {duration(plan.least_seconds)}{_open_end(plan)}.")
    else:
        lines.append("Nothing can be measured here. --assume NODESxGPUS plans for another machine.")
    return lines


def _convergence_line(plan: Plan) -> list[str]:
    """Return the cells of convergence trials, which the user chooses, as at most one line."""
    cells = dict.fromkeys(trial.cell for trial in plan.trials if trial.kind == "convergence")
    if not cells:
        return []
    chosen = "; ".join(plan.labels.of_cell(cell) for cell in list(cells)[:8]) + ("; ..." if len(cells) > 8 else "")
    return [f"Convergence (convergence.only chooses): {chosen}."]


def _open_end(plan: Plan) -> str:
    if any(trial.kind == "convergence" for trial in plan.trials):
        return " plus the epochs of the convergence trials"
    return "; longer if a window's steps take longer than the window"
