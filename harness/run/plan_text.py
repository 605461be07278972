"""The plan and the forecast of --memory as tables and lines of text, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.analysis.common import order
from harness.config.values import GIB, MIB
from harness.plan.cell import Cell, format_gpu_ids
from harness.plan.checks.memory import REFUSE, WARN
from harness.plan.comparison import axes_of
from harness.plan.memory_forecast import CUDA_ALLOWANCE, Forecast
from harness.plan.planner import Plan, why_trained
from harness.plan.rows import Purpose
from harness.plan.trial import Trial, WorkerGroup
from harness.report.labels import plural
from harness.report.tables.text import impossible_lines
from harness.run.events import MemoryForecast
from harness.system.sanitize import escape_control

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


STATE = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "buckets")
REST = ("activa-\ntions", "allow-\nance")
WIDE = 120
"""The least columns of a terminal in which each part of the state has a column of its own."""
COLOURS = {"fits": "green", "may not fit": "yellow", "will not fit": "red"}
MISSING = "-"


def memory_table(event: MemoryForecast, width: int) -> Table:
    """Return a row for each cell: its peak on one device, the parts of it in MiB, and the verdict.

    ``width``: columns of the terminal; in a narrow one the parts of the state are one.
    """
    wide = width >= WIDE
    table = Table(
        title="Will it fit: estimated peak memory of one device, MiB",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("cell", overflow="fold")
    for heading in ("peak", *(STATE if wide else ("state",)), *REST):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for cell, found in sorted(event.forecasts.items(), key=lambda item: _order(item[0])):
        verdict = Text(found.verdict, style=COLOURS.get(found.verdict, ""))
        verdict.append(" (counted)" if found.how == "counted" else "", style="")
        table.add_row(escape_control(event.labels.of_cell(cell)), *map(_mib, _sizes(found, wide=wide)), verdict)
    return table


def _order(cell: Cell) -> tuple[str, int, int, str]:
    return (cell.strategy, cell.devices, cell.global_batch_size, cell.id)


def _sizes(found: Forecast, *, wide: bool) -> list[int | None]:
    """Return the peak and its parts."""
    state = found.state
    parts = (state.parameters, state.gradients, state.optimizer, state.buckets) if state else (None,) * len(STATE)
    kept = parts if wide else (state.total if state else None,)
    return [found.peak, *kept, found.activations, found.allowance]


def _mib(size: int | None) -> str:
    if size is None:
        return MISSING
    return f"{size / MIB:,.0f}" if size >= 100 * MIB or not size else f"{size / MIB:.1f}"


def memory_lines(event: MemoryForecast) -> list[str]:
    """Return what the numbers of the table mean and are compared with, and the reasons of those that are missing."""
    forecasts = event.forecasts
    lines = []
    for on_cpu in sorted({cell.device == "cpu" for cell in forecasts}):
        first = next(found for cell, found in forecasts.items() if (cell.device == "cpu") is on_cpu)
        lines += [_available(first, on_cpu=on_cpu), _allowance(on_cpu=on_cpu)]
    lines.append(
        "State: parameters, gradients, the optimizer's state and ddp's buckets. A training step is traced on tensors "
        "without memory, as PyTorch runs it on a CPU: without workspaces of kernels, and without compilation. "
        "Activations are what its peak is above the other parts, temporary tensors included."
    )
    if any(found.how == "counted" for found in forecasts.values()):
        lines.append("Counted: from the sizes of the model and the trace of one device; the strategy is not traced.")
    reasons: dict[str, list[Cell]] = {}
    for cell, found in forecasts.items():
        if found.reason:
            reasons.setdefault(found.reason, []).append(cell)
    for reason, cells in reasons.items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"Not traced: {event.labels.of_cell(cells[0])}{more}: {reason}.")
    return lines


def _available(found: Forecast, *, on_cpu: bool) -> str:
    if found.available is None:
        place, advice = ("node", "") if on_cpu else ("GPU", "; --assume NODESxGPUS:NAME gives it, as 1x8:H100-80GB")
        return f"The memory of a {place} is not known, so there is no verdict{advice}."
    place = "node, for all of its processes" if on_cpu else "GPU"
    return (
        f"Memory of a {place}: {found.available / GIB:.1f} GiB. Above {WARN:g} of it a cell may not fit, above "
        f"{REFUSE:g} it will not."
    )


def _allowance(*, on_cpu: bool) -> str:
    if on_cpu:
        return "Allowance: the process with its libraries and data, as it was before the model was built."
    return (
        f"Allowance: {CUDA_ALLOWANCE / MIB:,.0f} MiB, assumed and not measured, for the CUDA context, kernels and "
        "workspaces of cuBLAS and cuDNN, and NCCL's buffers."
    )
