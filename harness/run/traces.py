"""Traces of the best cell and its base: both are profiled once more after the blocks; the report links the files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from time import time

from harness.analysis.results import load
from harness.config.script import ScriptExperiment
from harness.errors import ClusterLostError, HarnessError, WriteError
from harness.launch.protocol import Launcher
from harness.plan.cell import Cell
from harness.plan.planner import Plan, trace_groups
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.report.candidates import best_cell
from harness.report.sentence import context_of
from harness.run.events import Emit, Note

MOST_BYTES = 20_000_000
"""Of all traces together. The ranks of both cells have the same share of it."""


def keep_traces(plan: Plan, folder: RunFolder, launcher: Launcher, deadline: float | None, emit: Emit) -> None:
    """Keep the traces of the best cell on several devices and of its base, if the experiment explains its cells.

    In fresh processes, as a profiler may slow what follows it. They are no trials: a failure is a message, and costs
    the traces alone, unless the cluster is lost or a file cannot be written (ClusterLostError, WriteError). Nothing is
    profiled if the same cells were, or after ``deadline`` (unix time); what fails replaces no earlier traces.
    """
    settings = plan.experiment.throughput
    scripted = isinstance(plan.experiment, ScriptExperiment)  # whose processes are profiled in their own trials
    if settings is None or not (settings.explain and settings.traces) or scripted:
        return
    if deadline is not None and time() >= deadline:
        return
    try:
        cells = _best_and_base(plan, folder)
        if not cells or folder.traces().keys() == cells.keys():
            return
        emit(Note("Profiling the best cell and its base once more, for their traces"))
        found, failed = _profiled(plan, cells, launcher, deadline)
        if found:
            folder.keep_traces(found, instead=found.keys() == cells.keys())
        if failed:
            emit(Note(f"No trace of each rank: {failed}"))
    except (ClusterLostError, WriteError):  # these end the run
        raise
    except HarnessError as error:
        emit(Note(f"No traces: {error}"))
    except Exception as error:
        emit(Note(f"No traces: {type(error).__name__}: {error}"))


def _best_and_base(plan: Plan, folder: RunFolder) -> dict[str, Cell]:
    """Return both cells by id; none if no cell leads, or it has no base beside itself."""
    context = context_of(load(folder.path))
    ratio = context.ratio(best_cell(context))
    if ratio is None:
        return {}
    cells = {trial.cell.id: trial.cell for trial in plan.trials}
    return {name: cells[name] for name in (str(ratio.base_id), str(ratio.cell_id)) if name in cells}


def _profiled(
    plan: Plan, cells: Mapping[str, Cell], launcher: Launcher, deadline: float | None
) -> tuple[dict[str, tuple[bytes, ...]], str]:
    """Return the traces of each cell that was profiled, by rank, and why some of them are missing."""
    found: dict[str, tuple[bytes, ...]] = {}
    failed: dict[str, None] = {}
    for group in trace_groups(plan, list(cells.values()), MOST_BYTES):
        of_trial = {trial.id: trial.cell.id for trial in group.trials}
        with closing(launcher.launch(group, deadline=deadline)) as messages:
            for message in messages:
                if isinstance(message, TrialResult):
                    if message.outcome != "ok":
                        failed[message.reason] = None
                        continue
                    found[of_trial[message.trial_id]] = message.traces
                    if not all(message.traces):
                        failed[f"those of some ranks exceed their share of {MOST_BYTES // 10**6} MB"] = None
    return found, "; ".join(failed)
