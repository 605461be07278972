"""The plan as a table and lines of text, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.analysis.common import order
from harness.plan.cell import Cell, format_gpu_ids
from harness.plan.comparison import axes_of
from harness.plan.planner import Plan
from harness.plan.rows import Purpose
from harness.plan.trainings import why_trained
from harness.plan.trial import Trial, WorkerGroup
from harness.report.tables.text import impossible_lines, plural

WHY: Mapping[Purpose, str] = {
    "twin": "for the noise floor (A/A test of the base)",
    "explain": "for the losses of efficiency",
    "profile": "for the collectives (profiles)",
    "equivalence": "for the equivalence of strategies",
    "doctor": "for the doctor, each the first trial of its worker group",
    "links": "for the bandwidth of links and collectives",
}


def plan_table(plan: Plan) -> Group:
    """Return the number of cells and trials of the file, and of added trials, by strategy, devices and workers."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("strategy", "devices", "workers", "cells", "throughput", "convergence", "added"):
        text = heading in ("strategy", "workers")
        table.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    by_key: dict[tuple[str, int, str], list[Trial]] = {}
    for group in plan.groups:
        for trial in group.trials:
            key = (trial.cell.strategy, trial.cell.devices, _workers(group))
            by_key.setdefault(key, []).append(trial)
    for (strategy, devices, workers), trials in sorted(by_key.items()):
        asked = [trial for trial in trials if not trial.added]
        kinds = [trial.kind for trial in asked]
        cells, added = len({trial.cell for trial in asked}), len(trials) - len(asked)
        numbers = (cells, kinds.count("throughput"), kinds.count("convergence"), added)
        table.add_row(strategy, str(devices), workers, *map(str, numbers))
    title = f"Plan of {plan.experiment.name}: what the file asks for, and what is added"
    return Group(Text(title, style="bold"), table)


def _workers(group: WorkerGroup) -> str:
    """Return '2', '8 on 2 nodes' or '1, torchrun': the processes of a worker group, and what is not the default."""
    placement = group.placement
    nodes = f" on {placement.nodes} nodes" if placement.nodes > 1 else ""
    gpus = f" on GPU {format_gpu_ids(placement.device_ids)}" if placement.device_ids else ""
    launcher = f", {group.launcher}" if group.launcher != "ray" else ""
    return f"{placement.workers}{nodes}{gpus}{launcher}"


def plan_lines(plan: Plan) -> list[str]:
    """Return the rest of the plan as text: the machine, what all cells share, what is added, what cannot run."""
    machine = plan.machine
    devices = plural(machine.devices, "GPU" if machine.device == "cuda" else "CPU slot")
    lines = [f"On {plan.inventory}: {devices}, {plural(machine.threads_per_device, 'thread')} each."]
    if plan.labels.constants:
        lines.append(f"Every cell: {plan.labels.constants}.")
    lines += _numbers(plan)
    reasons: dict[str, set[Cell]] = {}
    for skip in plan.skips:
        reasons.setdefault(skip.reason, set()).add(skip.trial.cell)
    lines += [f"Skipped: {plural(len(cells), 'cell')}: {reason}." for reason, cells in reasons.items()]
    lines += impossible_lines(Counter(each.reason for each in plan.impossible))
    if plan.trials:
        lines += _convergence_line(plan)
    elif plan.skips:
        lines.append("Nothing can be measured here. --assume NODESxGPUS plans for another machine.")
    else:
        lines.append("Nothing can be measured on any machine: give other strategies, devices, nodes or batch sizes.")
    return lines


def _numbers(plan: Plan) -> list[str]:
    """Return the trials that the file asks for, those added with the reason of each, and the groups of both."""
    if not plan.trials:
        return []
    asked = [trial for trial in plan.trials if not trial.added]
    bases = [trial for trial in plan.trials if trial.added and trial.kind != "diagnostic"]
    purposes: Counter[Purpose] = Counter(trial.purpose for trial in plan.trials if trial.purpose)
    cells, added = ({trial.cell for trial in trials} for trials in (asked, bases))
    blocks = plural(plan.blocks, "block")
    lines = [f"Asked: {plural(len(cells), 'cell')}, {plural(len(asked), 'trial')} in {blocks}."] if asked else []
    if added:
        lines.append(f"Added: {plural(len(added), 'cell')}, {plural(len(bases), 'trial')}: the base of ratios.")
    lines += [
        f"Added: {plural(purposes[purpose], 'trial')} {why}." for purpose, why in WHY.items() if purpose in purposes
    ]
    groups = f"{plural(len(plan.groups), 'worker group')} of fresh processes"
    return [
        *lines,
        f"Together: {plural(len(plan.trials), 'trial')} in {groups}; random order from seed {plan.experiment.seed}.",
    ]


def _convergence_line(plan: Plan) -> list[str]:
    """Return the cells of convergence trials, which the user chooses, as at most one line."""
    trained = {trial.cell for trial in plan.trials if trial.kind == "convergence"}
    if not trained:
        return []
    cells = sorted(trained, key=lambda cell: order(axes_of(cell)))
    chosen = "; ".join(map(plan.labels.of_cell, cells[:8])) + ("; ..." if len(cells) > 8 else "")
    settings = plan.experiment.convergence
    assert settings is not None
    return [f"Convergence: {chosen} ({why_trained(settings)})."]
