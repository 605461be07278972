"""The plan of a request and the estimates of its time and memory, shown or recorded; no rank is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harness.analysis.durations import TimedRun, newest_with, timed_run
from harness.analysis.preview import estimate_of, preview, savings
from harness.config.experiment import Experiment
from harness.plan.cell import Cell
from harness.plan.memory_forecast import Forecast, forecast, traced_cell
from harness.plan.planner import Plan
from harness.plan.rows import Examination
from harness.plan.run_environment import spent_device_seconds
from harness.record.estimate import Estimate
from harness.record.folder import RunFolder
from harness.report.tables.preview import preview_lines, preview_table, source_line, total_line
from harness.report.tables.text import duration
from harness.run.auto_resume import prepare_run
from harness.run.child_process import child_process
from harness.run.events import Emit, MemoryForecast, Note, Planned, Previewed
from harness.run.request import Request
from harness.run.resume import pending
from harness.system.import_path import path_without
from harness.system.user_code import CodeVersion

LIMIT_S = 300.0
"""The longest time of one trace, the start of its process included."""


def estimated(
    request: Request, plan: Plan, resumed: RunFolder | None, fits: Mapping[str, str] | None = None
) -> tuple[Estimate, Previewed]:
    """Return the estimate of what is to be measured, from the run of ``--like`` or the newest one with these cells.

    And what is shown of it: the total and its source, for the beginning of a run; for a dry run, with ``fits``, whether
    cells fit, by their id, the table by part and all sentences. Raises RunFolderError if ``--like`` names no run, or a
    damaged one.
    """
    left, spent_device_s = plan, 0.0
    if resumed:
        lines = resumed.lines()
        left = replace(plan, groups=pending(plan, lines))
        spent_device_s = spent_device_seconds(resumed.environment(), lines, plan.machine.devices)
    cells = {trial.cell.id for trial in left.trials if trial.kind != "diagnostic"}
    if request.like:
        earlier: TimedRun | None = timed_run(RunFolder.open(request.like))
    else:
        earlier = newest_with(cells, request.output) if cells else None
    estimate, settings = estimate_of(left, earlier), plan.experiment.improve
    then = [f"Then options are tried on the best cell, for at most {duration(settings.time)}."] if settings else []
    if fits is None:
        return estimate, Previewed((total_line(left, estimate), source_line(left, earlier), *then))
    table = preview_table(preview(estimate, left.machine.devices), left.experiment.cost, fits)
    sentences = preview_lines(left, estimate, earlier, savings(left, earlier), spent_device_s)
    return estimate, Previewed((*sentences, *then), table)


def show_plan(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Show the checked plan; return the exit code. Raises HarnessError."""
    with ExitStack() as stack:
        _, prepared = prepare_run(request, experiment, stack, emit)
        emit(Planned(prepared.plan))
        fits: dict[str, str] = {}
        if request.memory and prepared.plan.trials:
            emit(Note(f"Tracing a step of each kind of cell, in at most {LIMIT_S:.0f} s each, to estimate its memory."))
            found = forecasts(prepared.plan, request.home)
            emit(MemoryForecast(found, prepared.plan.labels))
            fits = {cell.id: forecast.verdict for cell, forecast in found.items()}
        if prepared.plan.trials or request.like:
            emit(estimated(request, prepared.plan, prepared.folder, fits)[1])
    return 0


def forecasts(plan: Plan, home: Path, limit_s: float = LIMIT_S) -> dict[Cell, Forecast]:
    """Return the forecast of each cell that the plan measures, after a trace of each kind of them.

    Runs the workload's code, in child processes. ``home``: the experiment file's folder. ``limit_s``: of one trace.
    """
    cells = list(dict.fromkeys(trial.cell for trial in plan.trials if trial.kind != "diagnostic"))
    wanted = dict.fromkeys(map(traced_cell, cells))
    own = [str(home)] if plan.experiment.own_modules else []
    found: dict[Cell, Examination] = {}
    for variant in dict.fromkeys(cell.variant for cell in wanted):
        version = plan.variants[variant].version if variant else None
        path = path_without(*version.hidden) if version else [*own, *path_without(*own)]
        found |= _examinations([cell for cell in wanted if cell.variant == variant], version, path, limit_s)
    # a process that has traced other cells is larger than a rank's
    process = min((each["process_bytes"] for each in found.values() if each["process_bytes"]), default=0)
    return {
        cell: forecast(cell, {**found[traced_cell(cell)], "process_bytes": process}, plan.inventory) for cell in cells
    }


def _examinations(
    cells: Sequence[Cell], version: CodeVersion | None, path: Sequence[str], limit_s: float
) -> dict[Cell, Examination]:
    """Return the examination of each cell; after one that ends its process, or takes too long, in a new process."""
    from harness.measure.memory_trace import examine  # for dry runs that trace something alone

    found: list[Examination] = []
    while len(found) < len(cells):
        with child_process(examine, cells[len(found) :], version, path) as child:
            found += child.answers(limit_s)
        if len(found) < len(cells):
            took_longer = f"the trace took longer than {limit_s:.0f} s and was ended"
            reason = f"the process that traces it {child.end}" if child.end else took_longer
            found.append({"sizes": None, "process_bytes": 0, "peak": None, "reason": reason})
    return dict(zip(cells, found, strict=True))
