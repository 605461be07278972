"""The command's pipeline: experiment file -> plan -> worker groups -> records -> tables, figures, report."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from harness.analysis.results import load
from harness.config.experiment import Experiment
from harness.config.script import ScriptExperiment
from harness.errors import ClusterLostError, HarnessError, RunFolderError, WriteError
from harness.launch.protocol import Launcher
from harness.launch.ray.cluster import Cluster
from harness.plan.cell import Cell
from harness.plan.planner import Plan, trace_groups
from harness.plan.run_environment import Ended, Invocation
from harness.plan.trial import TrialResult
from harness.record.estimate import Estimate, write_estimate
from harness.record.folder import RunFolder
from harness.record.store import open_store
from harness.report.candidates import best_cell
from harness.report.html import IncompleteReport, write_report
from harness.report.row import plural
from harness.report.sentence import Context
from harness.report.verdict import verdict_if_possible
from harness.run.auto_resume import prepare_run
from harness.run.dry_run import estimated
from harness.run.events import Emit, Note, Planned, Reported, Reporting, RunStarted
from harness.run.execution import Execution, launcher_for, start_ray
from harness.run.mirroring import mirrored
from harness.run.prepare import check_imports, check_paths, check_runnable
from harness.run.provenance import differences, invocation_facts, source_facts
from harness.run.request import AUTO, Request, check_output, program, resume_command, submit_command
from harness.run.resume import pending
from harness.system.process import INTERRUPTED, UNSETTLED, deferred_interrupts
from harness.system.scratch import sweep

OK, FAILED = 0, 1
SHOWN = ("trials", "scaling", "noise", "versus", "parity", "equivalence", "links", "collectives", "findings", "preview")
"""The tables that a run shows at its end."""
NOTHING_SETTLED = (
    "This invocation settled no trial: {left} to measure at its start and at its end. With the same time limit a "
    f"resume would repeat it (exit code {UNSETTLED}: a script should not resume); allow more time, or shorten "
    "throughput.window_seconds"
)


def run(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Plan, measure and report; return the exit code, UNSETTLED if an interruption left as many trials as before.

    Raises HarnessError if nothing was started.
    Raises WriteError if results can no longer be recorded; every record before is complete.
    """
    began = time.time()
    source = request.source_text()  # before nodes are waited for, and a largest batch searched
    check_output(request)
    if request.store and request.resume in (None, AUTO):  # else the store is read first: has it the run?
        open_store(request.store).check()
    with ExitStack() as stack:
        request, (plan, ray_cluster, folder) = prepare_run(request, experiment, stack, emit)
        check_runnable(request, plan)
        emit(Planned(plan))
        estimate: Estimate | None = None
        if plan.trials:
            estimate, shown = estimated(request, plan, folder)
            emit(shown)
        check_paths(plan, ray_cluster)
        if plan.experiment.preflight and request.preflight:
            check_imports(plan, ray_cluster, request.home)
        sweep()
        if folder:
            folder.extend(plan.experiment, plan)
        else:
            folder = RunFolder.create(request.output, plan.experiment, plan, source)
            stack.enter_context(folder.locked())
            if estimate:  # of a run that is resumed it would be the estimate of what is left
                write_estimate(folder, estimate)
        plan = _keeping_checkpoints(plan, folder, ray_cluster)
        before = _left(plan, folder)
        try:
            with mirrored(request, folder, emit) as sending:
                code = _measure_and_report(plan, folder, request, ray_cluster, began, sending or emit)
        except KeyboardInterrupt:  # a second signal, after which nothing is looked at
            return INTERRUPTED
        if code != INTERRUPTED:
            return FAILED if sending and not sending.complete else code
        progress = not before or _left(plan, folder) < before or plan.experiment.checkpoint  # epochs have no lines
        if progress or not request.resumable:
            return INTERRUPTED
        emit(Note(NOTHING_SETTLED.format(left=plural(before, "trial"))))
        return UNSETTLED


def _left(plan: Plan, folder: RunFolder) -> int:
    return sum(len(group.trials) for group in pending(plan, folder.lines()))


def _measure_and_report(
    plan: Plan, folder: RunFolder, request: Request, ray_cluster: Cluster | None, began: float, emit: Emit
) -> int:
    """Measure what is pending and write the report; return the exit code. Raises WriteError."""
    try:
        if request.inline:  # every worker group in this process, for a debugger
            from harness.launch.inline import InlineLauncher  # and with it torch

            inline = InlineLauncher(plan.experiment, plan.machine.threads_per_device, marked=True)
            _measure(plan, folder, inline, request, began, emit)
        else:
            with start_ray(ray_cluster, plan) as ready, ExitStack() as launched:
                launcher = launcher_for(plan, ready, request.home, launched, emit, request.store is not None)
                _measure(plan, folder, launcher, request, began, emit)
    except (KeyboardInterrupt, WriteError, ClusterLostError) as end:
        return _ended_early(end, folder, request, began, emit)
    code = _report(folder, began, emit, _exit_code(folder, plan))
    if code == INTERRUPTED and request.resumable:  # amid the report: --resume auto goes on with the run
        with deferred_interrupts():
            folder.set_invocation(len(folder.environment()["invocations"]) - 1, {"ended": "interrupted"})
        emit(Note(f"Resume with: {resume_command(request, folder.path)}"))
    return code


def _measure(plan: Plan, folder: RunFolder, launcher: Launcher, request: Request, began: float, emit: Emit) -> None:
    """Measure every pending trial of the plan; record the invocation's start and end."""
    known = None if request.no_user_code else request.home  # git runs what a repository's own settings name
    facts = invocation_facts(plan, known)
    if request.content is None:
        with suppress(OSError):  # the file was removed since it was read
            facts["source"] = source_facts(request.file, plan.experiment, sys.path)
    earlier = folder.environment().get("invocations", [])
    differs = differences(earlier[-1], facts) if earlier else []
    for difference in differs:
        emit(Note(f"Changed since the last invocation: {difference}"))
    execution = Execution(plan, folder, launcher, emit, began, f"{facts['harness']}, {facts['workload_code']}")
    start: Invocation = {**facts, "started_at": began, "command": sys.argv[1:], "differs": differs}
    if submit := submit_command(request, folder.path):
        start["submit"] = submit
    folder.set_invocation(execution.invocation, start)
    emit(RunStarted(folder.path, plan, execution.groups, execution.done, execution.limit_s))
    ended: Ended = "error"
    try:
        execution.run()
        if not request.inline:
            keep_traces(plan, folder, launcher, execution.deadline, emit)
        ended = "finished"
    except KeyboardInterrupt:
        ended = "interrupted"
        raise
    finally:
        with deferred_interrupts():
            end: Invocation = {"wall_s": time.time() - began, "ended": ended, "running": execution.running}
            folder.set_invocation(execution.invocation, end)


def _ended_early(end: BaseException, folder: RunFolder, request: Request, began: float, emit: Emit) -> int:
    """Report an early end and return its exit code; the commands come first, since the report may be cut short too."""
    resume = f"Resume with: {resume_command(request, folder.path)}\n" if request.resumable else ""
    commands = f"{resume}{_how_to_report(folder)}"
    if isinstance(end, WriteError):
        emit(Note(commands))
        raise end
    if isinstance(end, ClusterLostError):
        emit(Note(f"{end}. Every finished trial is recorded. {commands}"))
        return _report(folder, began, emit, FAILED)
    emit(Note(f"Interrupted. Every finished trial is recorded. {commands}"))
    return _report(folder, began, emit, INTERRUPTED)


def _report(folder: RunFolder, began: float, emit: Emit, code: int) -> int:
    """Write the report; return the exit code, or INTERRUPTED if the report is.

    Raises IncompleteReport, once all else is written and shown, unless the run was interrupted.
    """
    if not folder.trial_lines():
        emit(Note(f"No trial was finished; {folder.path} holds the plan"))
        return code
    incomplete: IncompleteReport | None = None
    reporting = time.time()
    emit(Reporting())
    try:
        results = write_report(folder.path)
    except IncompleteReport as error:
        results, incomplete = error.results, error
    except KeyboardInterrupt:
        emit(Note(f"Interrupted before the report was complete; every result is recorded. {_how_to_report(folder)}"))
        return INTERRUPTED
    with deferred_interrupts():  # by which later runs estimate it
        invocations = folder.environment().get("invocations", [])
        if invocations:
            folder.set_invocation(len(invocations) - 1, {"report_s": time.time() - reporting})
    tables = {name: getattr(results, name) for name in SHOWN}
    emit(Reported(folder.path, folder.report, tables, verdict_if_possible(results), time.time() - began))
    if incomplete and code != INTERRUPTED:
        raise incomplete
    if incomplete:
        emit(Note(str(incomplete)))
    return code


def _how_to_report(folder: RunFolder) -> str:
    return f"Report of the recorded trials: {shlex.join([*program('report'), str(folder.path)])}"


def _exit_code(folder: RunFolder, plan: Plan) -> int:
    """Return 0 if some trial was measured and every planned one is ok or skipped; else 1."""
    lines = {line["trial_id"]: line for line in folder.trial_lines()}
    if any(line["skip_code"] in ("doctor", "doctor_memory") for line in lines.values()):
        return FAILED
    last = {trial_id: line["outcome"] for trial_id, line in lines.items()}
    # a check that cannot be made is a finding, no failure of the measurement; nor is what stands beside it
    beside = ("equivalence", "doctor", "links", "profile", "threads")
    counted = [trial for trial in plan.trials if trial.purpose not in beside] or plan.trials
    outcomes = [last.get(trial.id, "lost") for trial in counted]
    measured = "ok" in outcomes
    return OK if measured and all(outcome in ("ok", "skipped") for outcome in outcomes) else FAILED


def _keeping_checkpoints(plan: Plan, folder: RunFolder, ray_cluster: Cluster | None) -> Plan:
    """Return the plan with this run's folder of checkpoints or of a script's files, which every node must see.

    Raises RunFolderError.
    """
    experiment = plan.experiment
    settings, keeps = experiment.checkpoint, isinstance(experiment, ScriptExperiment) and bool(experiment.keep)
    if settings is None and not keeps:
        return plan
    name = "keep" if settings is None else "checkpoint.folder"
    here = (folder.path / "files" if settings is None else folder.checkpoints(settings.folder)).absolute()
    try:
        here.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{name}: {here} cannot be made: {error.strerror}; give another") from None
    unseen = ray_cluster.missing_paths([str(here)]) if ray_cluster else {}
    if unseen:
        raise RunFolderError(f"{name}: {here} is not there on {', '.join(unseen)}; give a folder that all nodes see")
    kept: dict[str, object] = {"keep": str(here)}
    if settings:
        kept = {"checkpoint": settings.model_copy(update={"folder": str(here)})}
    return replace(plan, experiment=experiment.model_copy(update=kept))


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
    if deadline is not None and time.time() >= deadline:
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
    context = Context(load(folder.path))
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
