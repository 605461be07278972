"""The estimate of a plan before it is run: shown by a dry run, recorded by a run, from which it is graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from harness.analysis.earlier_run import EarlierRun, earlier_run, newest_with
from harness.analysis.graded import preview
from harness.analysis.preview import estimate_of, savings
from harness.plan.planner import Plan
from harness.record.estimate import Estimate
from harness.record.folder import RunFolder
from harness.report.preview_words import preview_lines, source_line, total_line
from harness.report.tables.preview import preview_table
from harness.run.events import Previewed
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
