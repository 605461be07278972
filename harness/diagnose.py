"""The doctor's command: examines an experiment's cells on real ranks, measures nothing, tells what it found."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.analyse import figures
from harness.cell import Cell
from harness.config import Experiment, load
from harness.doctor import batches, links, versions
from harness.doctor.finding import Finding
from harness.events import Emit, Examined, RunStarted
from harness.execute import Execution
from harness.plan import Plan, examined
from harness.plan_rows import axes_of
from harness.preflight import refuse_user_code
from harness.record import RunFolder
from harness.results import Results
from harness.schema import FINDINGS
from harness.scratch import Scratch, sweep
from harness.stage import Request, check_paths, connected, import_path, launcher_for, planned, started_ray

HEALTHY, ILL = 0, 1


@dataclass(frozen=True)
class Diagnosis:
    """``findings`` as in schema.FINDINGS; ``figures``: what was measured on the way, by trial."""

    findings: pd.DataFrame
    figures: Mapping[str, Mapping[str, str]]
    plan: Plan

    @property
    def code(self) -> int:
        """1 where there is an error among the findings."""
        return ILL if self.findings["severity"].eq("error").any() else HEALTHY


def diagnose(request: Request, emit: Emit) -> int:
    """Examines and tells; returns the exit code. Raises HarnessError where nothing was started."""
    experiment = load(request.file)
    if request.no_user_code:
        refuse_user_code(experiment, request.file)
    experiment = experiment.model_copy(update={"preflight": True, "checkpoint": None})
    home = request.file.resolve().parent
    with ExitStack() as stack:
        stack.enter_context(import_path(home) if experiment.own_workload else nullcontext())
        ray_cluster = connected(request, experiment, home, stack)
        whole = planned(request, experiment, ray_cluster)
        plan = examined(whole)
        check_paths(plan, ray_cluster)
        sweep()
        folder = RunFolder.create(stack.enter_context(Scratch()), experiment, plan, "")
        with started_ray(ray_cluster, plan) as ready, ExitStack() as launched:
            execution = Execution(plan, folder, launcher_for(plan, ready, home, launched), emit)
            emit(RunStarted(None, execution.trials, 0))
            execution.run()
        diagnosis = _diagnosed(whole, Results(folder))
    emit(Examined(diagnosis.findings, diagnosis.figures, diagnosis.plan))
    return diagnosis.code


def _diagnosed(plan: Plan, results: Results) -> Diagnosis:
    """What the ranks found, what the plan itself shows, and how the nodes compare."""
    first = plan.trials[0].cell if plan.trials else None
    nodes = [node for group in results.environment.get("groups", []) for node in group["nodes"]]
    ours = [(cell, finding) for cell in _uneven(plan) for finding in batches.uneven_batch(cell)]
    if first:
        ours += [(first, finding) for finding in [*versions.judge(nodes), *links.judge(nodes)]]
    rows = [_row(plan.experiment, cell, finding) for cell, finding in ours]
    findings = pd.concat([results.findings, FINDINGS.frame(rows)], ignore_index=True) if rows else results.findings
    return Diagnosis(findings, figures(results.lines), plan)


def _uneven(plan: Plan) -> list[Cell]:
    """The cells that are skipped because their batch does not divide by their devices."""
    cells = (skip.trial.cell for skip in plan.skips)
    return list(dict.fromkeys(cell for cell in cells if cell.per_device_batch_size is None))


def _row(experiment: Experiment, cell: Cell, finding: Finding) -> dict[str, Any]:
    return {"cell_id": cell.id, **axes_of(cell), **finding.row()}
