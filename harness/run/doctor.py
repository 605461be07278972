"""The doctor's command: examines an experiment's cells on real ranks, measures nothing, tells what it found."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

from harness.analysis import figures
from harness.analysis.results import Results
from harness.config.experiment import load_experiment
from harness.plan.checks import versions
from harness.plan.planner import examined, without_doctor_trials
from harness.record.folder import RunFolder
from harness.record.schema import FINDINGS
from harness.run.events import Emit, Examined, RunStarted
from harness.run.execution import Execution
from harness.run.prepare import (
    Request,
    check_paths,
    connect,
    failing_imports,
    import_path,
    launcher_for,
    make_checked_plan,
    start_ray,
)
from harness.run.validation import check_no_user_code
from harness.system.scratch import Scratch, sweep

HEALTHY, ILL = 0, 1


def run_doctor(request: Request, emit: Emit) -> int:
    """Examines and tells; returns the exit code. Raises HarnessError where nothing was started."""
    experiment = load_experiment(request.file)
    if request.no_user_code:
        check_no_user_code(experiment, request.file)
    experiment = experiment.model_copy(update={"preflight": True, "checkpoint": None})
    home = request.file.resolve().parent
    with ExitStack() as stack:
        stack.enter_context(import_path(home) if experiment.own_workload else nullcontext())
        ray_cluster = connect(request, experiment, home, stack)
        whole = make_checked_plan(request, experiment, ray_cluster)
        plan = examined(whole)
        check_paths(plan, ray_cluster)
        if failing := versions.cannot_import(failing_imports(plan, ray_cluster)):
            emit(Examined(FINDINGS.frame([finding.row() for finding in failing]), {}, without_doctor_trials(whole)))
            return ILL
        sweep()
        folder = RunFolder.create(stack.enter_context(Scratch()), experiment, plan, "")
        with start_ray(ray_cluster, plan) as ready, ExitStack() as launched:
            execution = Execution(plan, folder, launcher_for(plan, ready, home, launched), emit)
            emit(RunStarted(None, execution.trials, 0))
            execution.run()
        results = Results(folder)
        emit(Examined(results.findings, figures(results.lines), whole))
    return ILL if results.findings["severity"].eq("error").any() else HEALTHY
