"""``--memory``: traces of the cells of a plan in child processes, and the forecast of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.plan.cell import Cell
from harness.plan.memory_forecast import Forecast, forecast, traced_cell
from harness.plan.planner import Plan
from harness.plan.rows import Examination
from harness.run.child_process import child_process
from harness.system.import_path import path_without
from harness.system.user_code import CodeVersion

LIMIT_S = 300.0
"""The longest time of one trace, the start of its process included."""


def forecasts(plan: Plan, home: Path, limit_s: float = LIMIT_S) -> dict[Cell, Forecast]:
    """Return the forecast of each cell that the plan measures, after a trace of each kind of them.

    Runs the workload's code, in child processes. ``home``: the experiment file's folder. ``limit_s``: of one trace.
    """
    cells = list(dict.fromkeys(trial.cell for trial in plan.trials if trial.kind != "diagnostic"))
    wanted = dict.fromkeys(map(traced_cell, cells))
    own = [str(home)] if plan.experiment.own_code else []
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
            found.append({"sizes": None, "process_bytes": 0, "peak": None, "alone": False, "reason": reason})
    return dict(zip(cells, found, strict=True))
