"""The plan of a request and its estimate, shown or recorded; no rank is started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from harness.analysis.durations import EarlierRun, earlier_run, newest_with
from harness.analysis.preview import estimate_of, preview, savings
from harness.config.experiment import Experiment
from harness.plan.planner import Plan
from harness.record.estimate import Estimate
from harness.record.folder import RunFolder
from harness.report.tables.preview import preview_lines, preview_table, source_line, total_line
from harness.run.auto_resume import prepare_run
from harness.run.events import Emit, MemoryForecast, Note, Planned, Previewed
from harness.run.memory import LIMIT_S, forecasts
from harness.run.request import Request
from harness.run.resume import pending, spent_by


class Estimated(NamedTuple):
    """A plan, or what is left of it, its estimate, and the earlier run that this is from; None if there is none.

    ``spent_device_s``: the device-seconds of the run that is resumed.
    """

    plan: Plan
    estimate: Estimate
    earlier: EarlierRun | None
    spent_device_s: float = 0.0

    def in_full(self, fits: Mapping[str, str] = MappingProxyType({})) -> Previewed:
        """Return the table by part and the sentences, for a dry run; ``fits``: whether cells fit, by their id."""
        plan, estimate, earlier, spent_device_s = self
        table = preview_table(preview(estimate, plan.machine.devices, plan.experiment.cost, fits=fits))
        lines = preview_lines(plan, estimate, earlier, savings(plan, earlier), spent_device_s)
        return Previewed(tuple(lines), table)

    def in_short(self) -> Previewed:
        """Return the total and its source, for the beginning of a run."""
        return Previewed((total_line(self.plan, self.estimate), source_line(self.plan, self.earlier)))


def estimated(request: Request, plan: Plan, resumed: RunFolder | None) -> Estimated:
    """Return the estimate of what is to be measured, from the run of ``--like`` or the newest one with these cells.

    Raises RunFolderError if ``--like`` names no run, or a damaged one.
    """
    left, spent_device_s = plan, 0.0
    if resumed:
        lines = resumed.lines()
        left = replace(plan, groups=pending(plan, lines))
        spent_device_s = spent_by(resumed, lines, plan.machine.devices)
    cells = {trial.cell.id for trial in left.trials if trial.kind != "diagnostic"}
    if request.like:
        earlier: EarlierRun | None = earlier_run(RunFolder.open(request.like))
    else:
        earlier = newest_with(cells, request.output) if cells else None
    return Estimated(left, estimate_of(left, earlier), earlier, spent_device_s)


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
            emit(estimated(request, prepared.plan, prepared.folder).in_full(fits))
    return 0
