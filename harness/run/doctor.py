"""The doctor's command: examines an experiment's cells on real ranks, or measures the links of its placements."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pandas as pd

from harness.analysis.findings import figures
from harness.analysis.results import Results
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.script import ScriptExperiment
from harness.config.sections import Grid, Throughput
from harness.errors import ClusterLostError
from harness.plan.checks import cannot_import
from harness.plan.planner import Plan
from harness.record.folder import RunFolder
from harness.record.schema import FINDINGS
from harness.run.events import DoctorFinished, Emit, Note, RunStarted
from harness.run.execution import Execution, launcher_for, start_ray
from harness.run.pipeline import run
from harness.run.prepare import check_paths, check_runnable, failing_imports, prepare
from harness.run.request import Request
from harness.system.scratch import Scratch, sweep

HEALTHY, ILL = 0, 1
LINKS_S = 60.0
"""The maximum time of a placement's links and collectives under ``--links``."""


def run_doctor(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Examine the cells and report findings; return the exit code.

    Raises HarnessError if nothing was started; ClusterLostError after the findings so far are reported.
    """
    experiment = experiment.model_copy(update={"preflight": True, "checkpoint": None})
    home = request.home
    with ExitStack() as stack:
        whole, ray_cluster, _ = prepare(request, experiment, stack, emit)
        check_runnable(request, whole)
        plan = whole.keeping(lambda trial: trial.purpose == "doctor")
        check_paths(plan, ray_cluster)
        if failing := cannot_import(failing_imports(plan, ray_cluster, home)):
            unexamined = whole.keeping(lambda trial: trial.purpose != "doctor")
            emit(DoctorFinished(FINDINGS.frame([finding.row() for finding in failing]), {}, unexamined))
            return ILL
        sweep()
        folder = RunFolder.create(stack.enter_context(Scratch()), experiment, plan, "")
        try:
            with start_ray(ray_cluster, plan) as ready, ExitStack() as launched:
                execution = Execution(plan, folder, launcher_for(plan, ready, home, launched, emit), emit)
                emit(RunStarted(None, whole, execution.groups, 0))
                execution.run()
        except (KeyboardInterrupt, ClusterLostError) as end:
            cause = "Interrupted" if isinstance(end, KeyboardInterrupt) else "The cluster was lost"
            emit(Note(f"{cause}. The findings of the cells that were examined before:"))
            _report(folder, whole, emit)
            raise
        findings = _report(folder, whole, emit)
    return ILL if findings["severity"].eq("error").any() else HEALTHY


def _report(folder: RunFolder, whole: Plan, emit: Emit) -> pd.DataFrame:
    """Report the findings and return them; the logs that they name are kept, though the folder is not."""
    results = Results(folder)
    found = results.findings
    logs = [line["log"] for line in results.lines if line["log"]]
    if logs:
        kept = Path(tempfile.mkdtemp(prefix=f"{whole.experiment.name}-doctor-"))
        for log in logs:
            shutil.copy(folder.path / log, kept)
            found["advice"] = found["advice"].str.replace(log, str(kept / Path(log).name), regex=False)
    emit(DoctorFinished(found, figures(results.lines), whole))
    return found


def _placed_alike(experiment: ScriptExperiment) -> Experiment:
    """Return an experiment of the harness's own ranks with the placements of a script, or loop: links are theirs."""
    places = ("devices", "nodes", "device_ids")

    def grid(of: Grid) -> dict[str, object]:
        variables = {key: value for key, value in of.options.items() if key.startswith("env.")}
        placed = of.model_dump(include={*places}, exclude_unset=True)
        return {**placed, **variables, "strategy": "ddp", "per_device_batch_size": 1}

    kept = experiment.model_dump(
        mode="json", include={"name", "device", "limits", "cost", "cluster", "launcher", "env", "seed"}
    )
    content = {**kept, "workload": "mlp", "cells": [grid(each) for each in experiment.grids]}
    return parse_experiment(content, source=experiment.name)


def run_links(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Measure the links of every placement, and nothing else, in a run folder; return the exit code.

    Raises HarnessError if nothing was started.
    """
    if isinstance(experiment, ScriptExperiment):
        experiment = _placed_alike(experiment)
    settings = {"twin": False, "explain": True, "links_seconds": LINKS_S}
    throughput = (experiment.throughput or Throughput()).model_copy(update=settings)
    without = {"convergence": None, "checkpoint": None, "equivalence": False, "preflight": False, "published": ()}
    return run(replace(request, links=True), experiment.model_copy(update={**without, "throughput": throughput}), emit)
