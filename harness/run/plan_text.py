"""The plan and the forecast of --memory as tables and lines of text, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.analysis.common import grouped, order
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import Experiment
from harness.config.sections import EFFORTS
from harness.config.values import GIB, MIB
from harness.plan.cell import Cell, format_gpu_ids, place
from harness.plan.checks import join_names
from harness.plan.comparison import axes_of, options_text, value_text
from harness.plan.memory_forecast import CUDA_ALLOWANCE, REFUSE, WARN
from harness.plan.planner import Plan, why_apart, why_trained
from harness.plan.rows import Purpose
from harness.plan.trial import PURPOSES, Trial, WorkerGroup
from harness.report.row import plural
from harness.report.tables.text import duration, impossible_lines
from harness.run.events import MemoryForecast
from harness.system.sanitize import escape_control

STATE = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "buckets")
REST = ("activa-\ntions", "allow-\nance")
WIDE = 120
"""The least columns of a terminal in which each part of the state has a column of its own."""
MOST_GROUPS = 8
"""The most strategies of a worker group, and the most groups for one reason, that are named."""
MANY_NODES = 8
FILES_OF_IMPORT = 4300
"""The files that a process opens to import torch, Ray and this package."""
COLOURS = {"fits": "green", "may not fit": "yellow", "will not fit": "red"}


def plan_table(plan: Plan) -> Group:
    """Return the number of cells and trials of the file, and of added trials, by strategy, devices and workers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("strategy", "devices", "workers", "cells", "throughput", "convergence", "added"):
        text = heading in ("strategy", "workers")
        table.add_column(heading, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    by_key: dict[tuple[str, int, str], list[Trial]] = {}
    for group in plan.groups:
        for trial in group.trials:
            placement = place(trial.cell)
            workers = str(placement.workers)  # with what is not the default: '8 on 2 nodes', '1, torchrun'
            workers += f" on {placement.nodes} nodes" if placement.nodes > 1 else ""
            workers += f" on GPU {format_gpu_ids(placement.device_ids)}" if placement.device_ids else ""
            workers += f", {group.launcher}" if group.launcher != "ray" else ""
            key = (trial.cell.strategy, trial.cell.devices, workers)
            by_key.setdefault(key, []).append(trial)
    for (strategy, devices, workers), trials in sorted(by_key.items()):
        asked = [trial for trial in trials if not trial.added]
        kinds = [trial.kind for trial in asked]
        cells, added = len({trial.cell for trial in asked}), len(trials) - len(asked)
        numbers = (cells, kinds.count("throughput"), kinds.count("convergence"), added)
        table.add_row(strategy, str(devices), workers, *map(str, numbers))
    title = f"Plan of {plan.experiment.name}: what the file asks for, and what is added"
    return Group(Text(title, style="bold"), table)


def plan_lines(plan: Plan) -> list[str]:
    """Return the rest of the plan as text: the machine, what all cells share, what is added, what cannot run."""
    machine = plan.machine
    devices = plural(machine.devices, "GPU" if machine.device == "cuda" else "CPU slot")
    lines = [f"On {plan.inventory}: {devices}, {plural(machine.threads_per_device, 'thread')} each."]
    if plan.labels.constants:
        lines.append(f"Every cell: {plan.labels.constants}.")
    lines += [*(_numbers(plan) if plan.trials else []), *_effort_lines(plan.experiment), *_loader_lines(plan)]
    for reason, trials in grouped(plan.skips, lambda trial: plan.skips[trial].text).items():
        lines.append(f"Skipped: {plural(len({trial.cell for trial in trials}), 'cell')}: {reason}.")
    lines += impossible_lines(Counter(reason.text for reason in plan.impossible.values()))
    lines += [f"exclude: no cell matches {options_text(rule)}." for rule in plan.unmatched]
    settings, trained = plan.experiment.convergence, {t.cell for t in plan.trials if t.kind == "convergence"}
    if settings and trained:
        cells = sorted(trained, key=lambda cell: order(axes_of(cell)))
        chosen = "; ".join(map(plan.labels.of_cell, cells[:8])) + ("; ..." if len(cells) > 8 else "")
        lines.append(f"Convergence: {chosen} ({why_trained(settings)}).")
    if plan.trials:
        return lines
    if plan.skips:
        lines.append("Nothing can be measured here. --assume NODESxGPUS plans for another machine.")
    else:
        lines.append("Nothing can be measured on any machine: give other strategies, devices, nodes or batch sizes.")
    return lines


def _effort_lines(experiment: Experiment) -> list[str]:
    """Return the line on what the file sets beside its effort, which leaves that to it."""
    timed, effort = experiment.throughput, EFFORTS[experiment.effort]
    own = {name: getattr(timed, name) for name, value in effort.items() if timed and getattr(timed, name) != value}
    given = ", ".join(f"{name}: {value_text(value)}" for name, value in own.items())
    return [f"effort: {experiment.effort}, but for what throughput has: {given}."] if own else []


def _loader_lines(plan: Plan) -> list[str]:
    """Return the line on loader workers that the file leaves to the harness, if there may be any."""
    cells = {trial.cell for trial in plan.trials if trial.timed or trial.kind == "convergence"}
    on_gpus = [cell for cell in cells if cell.device == "cuda" and not cell.traits.own_program]
    left = [cell for cell in on_gpus if cell.loader["workers"] is None and _may_decode(cell)]
    if not left:
        return []
    most = max(1, plan.machine.threads_per_device - 1)
    return [
        f"Loader: the doctor decides how many loader workers of {plural(len(left), 'cell')} on GPUs keep up with the "
        f"model, at most {most} a device, its cores less one. loader.workers: [0, {most}] in the grid compares."
        if plan.experiment.preflight
        else f"Loader: {plural(len(left), 'cell')} on GPUs have {plural(most, 'loader worker')} a device, its cores "
        f"less one, if their data set decodes a file for each sample, else none. loader.workers: [0, {most}] in the "
        "grid compares."
    ]


def _may_decode(cell: Cell) -> bool:
    builtin = BUILTIN_WORKLOADS.get(cell.workload)
    return builtin is None or (builtin.decodes and "/" in (cell.data or ""))


def _numbers(plan: Plan) -> list[str]:
    """Return the trials that the file asks for, those added with the reason of each, and the groups of both."""
    asked = [trial for trial in plan.trials if not trial.added]
    bases = [trial for trial in plan.trials if trial.added and trial.kind != "diagnostic"]
    purposes: Counter[Purpose] = Counter(trial.purpose for trial in plan.trials if trial.purpose)
    cells, added = ({trial.cell for trial in trials} for trials in (asked, bases))
    ruled = plan.experiment.throughput and plan.experiment.throughput.rule
    blocks = ("at most " if ruled else "") + plural(plan.blocks, "block")
    lines = [f"Asked: {plural(len(cells), 'cell')}, {plural(len(asked), 'trial')} in {blocks}."] if asked else []
    if added:
        lines.append(f"Added: {plural(len(added), 'cell')}, {plural(len(bases), 'trial')}: the base of ratios.")
    lines += [
        f"Added: {plural(purposes[purpose], 'trial')} {traits.why}."
        for purpose, traits in PURPOSES.items()
        if purpose in purposes
    ]
    together = (
        f"Together: {plural(len(plan.trials), 'trial')} in {plural(len(plan.groups), 'worker group')} of fresh "
        f"processes; random order from seed {plan.experiment.seed}, reversed in each second block."
    )
    most = plan.experiment.throughput.wait_for_quiet if plan.experiment.throughput else None
    waits = [f"Before each block: a wait until other programs are idle, at most {duration(most)}."] if most else []
    return [*lines, together, *_group_lines(plan), *waits, *_imports(plan)]


def _group_lines(plan: Plan) -> list[str]:
    """Return which cells share worker groups, and which do not and why; nothing if all groups are alike."""
    alike = grouped(plan.groups, lambda group: (str(group), _is_of_twins(group)))
    beside = "an A/A test is across processes" if any(map(_is_of_twins, plan.groups)) else "their processes differ"
    shared, apart = list[str](), dict[str, list[str]]()
    for (name, _), groups in alike.items():
        cells = {trial.cell: None for group in groups for trial in group.trials if trial.kind != "diagnostic"}
        twins = any(trial.purpose == "twin" for group in groups for trial in group.trials)
        names = [*_strategies(cells), *(["A/A tests"] if twins else [])]
        if not any(group.is_shared for group in groups):
            reasons = (why_apart(trial.cell) for group in groups for trial in group.trials)
            apart.setdefault(next(filter(None, reasons), beside), []).append(join_names(names, MOST_GROUPS) or name)
        elif len(names) > 1:
            named = f"{join_names(names, MOST_GROUPS)}, in {plural(len(groups), 'group')} of {name}"
            shared.append(f"Shared: {named}; each trial runs on the ranks that it needs.")
    if len(alike) == 1:
        return shared
    parts = ((why, "; ".join(sorted(names)[:MOST_GROUPS]), len(names) - MOST_GROUPS) for why, names in apart.items())
    own = [f"In groups of their own, as {reason}: {text}{f'; {n} more' * (n > 0)}." for reason, text, n in parts]
    return [*shared[:MOST_GROUPS], *own]


def _is_of_twins(group: WorkerGroup) -> bool:
    return all(trial.purpose == "twin" for trial in group.trials)


def _strategies(cells: Iterable[Cell]) -> list[str]:
    """Return the strategies of cells with their devices, and the number of the cells of each if there are several."""
    counts = Counter((cell.strategy, cell.devices) for cell in cells)
    every = sorted(counts.items(), key=lambda each: (-each[0][1], each[0][0]))
    return [f"{strategy} x{devices}" + f" ({count} cells)" * (count > 1) for (strategy, devices), count in every]


def _imports(plan: Plan) -> list[str]:
    """Return a line on the imports of a worker group of many nodes: one file system may not serve all of them."""
    nodes, processes = max((group.placement.nodes, group.placement.workers) for group in plan.groups)
    if nodes < MANY_NODES:
        return []
    return [
        f"Largest group: {processes} processes on {nodes} nodes import the packages at once, about {FILES_OF_IMPORT:,} "
        "files each: keep them on each node's own disk or in an image (experiments/clusters/README.md)."
    ]


def memory_table(event: MemoryForecast, width: int) -> Table:
    """Return a row for each cell: its peak on one device, the parts of it in MiB, and the verdict.

    ``width``: columns of the terminal; in a narrow one the parts of the state are one.
    """
    table = Table(
        title="Will it fit: estimated peak memory of one device, MiB",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    headings = STATE if width >= WIDE else ("state",)
    table.add_column("cell", overflow="fold")
    for heading in ("peak", *headings, *REST):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    cells = sorted(event.forecasts, key=lambda cell: (cell.strategy, cell.devices, cell.global_batch_size, cell.id))
    for cell in cells:
        found, state = event.forecasts[cell], event.forecasts[cell].state
        parts: tuple[int | None, ...] = (None,) * len(headings)
        if state:
            whole = (state.parameters, state.gradients, state.optimizer, state.buckets)
            parts = whole if width >= WIDE else (state.total,)
        verdict = Text(found.verdict, style=COLOURS.get(found.verdict, ""))
        verdict.append(" (counted)" if found.counted else "", style="")
        sizes = map(_mib, (found.peak, *parts, found.activations, found.allowance))
        table.add_row(escape_control(event.labels.of_cell(cell)), *sizes, verdict)
    return table


def _mib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / MIB:,.0f}" if size >= 100 * MIB or not size else f"{size / MIB:.1f}"


def memory_lines(event: MemoryForecast) -> list[str]:
    """Return what the numbers of the table mean and are compared with, and the reasons of those that are missing."""
    forecasts = event.forecasts
    lines = []
    for on_cpu in sorted({cell.device == "cpu" for cell in forecasts}):
        available = next(found.available for cell, found in forecasts.items() if (cell.device == "cpu") is on_cpu)
        place, advice = ("node", "") if on_cpu else ("GPU", "; --assume NODESxGPUS:NAME gives it, as 1x8:H100-80GB")
        if available is None:
            lines.append(f"The memory of a {place} is not known, so there is no verdict{advice}.")
        else:
            shared = ", for all of its processes" if on_cpu else ""
            lines.append(
                f"Memory of a {place}{shared}: {available / GIB:.1f} GiB. Above {WARN:g} of it a cell may not fit, "
                f"above {REFUSE:g} it will not."
            )
        lines.append(
            "Allowance: the process with its libraries and data, as it was before the model was built."
            if on_cpu
            else f"Allowance: {CUDA_ALLOWANCE / MIB:,.0f} MiB, assumed and not measured, for the CUDA context, kernels "
            "and workspaces of cuBLAS and cuDNN, and NCCL's buffers."
        )
    lines.append(
        "State: parameters, gradients, the optimizer's state and ddp's buckets. A training step is traced on tensors "
        "without memory, as PyTorch runs it on a CPU: without workspaces of kernels, and without compilation. "
        "Activations are what its peak is above the other parts, temporary tensors included."
    )
    if any(found.counted for found in forecasts.values()):
        lines.append("Counted: from the sizes of the model and the trace of one device; the strategy is not traced.")
    untraced = [cell for cell, found in forecasts.items() if found.reason]
    for reason, cells in grouped(untraced, lambda cell: forecasts[cell].reason).items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"Not traced: {event.labels.of_cell(cells[0])}{more}: {reason}.")
    return lines
