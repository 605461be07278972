"""The command's pipeline: experiment file -> plan -> worker groups -> records -> tables, figures, report."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from harness import cluster, redact
from harness.cluster import Cluster
from harness.config import Experiment, load
from harness.environment import git_commit
from harness.errors import RunFolderError
from harness.events import Emit, Note, Planned, Reported, RunStarted
from harness.execute import Execution
from harness.inventory import Inventory
from harness.launch import ByLauncher, Launcher
from harness.plan import Plan, make_plan, only
from harness.preflight import (
    check_optimizers,
    check_target,
    check_workloads,
    data_paths,
    download_data,
    missing_data,
    refuse_user_code,
)
from harness.record import RunFolder
from harness.report import write_report
from harness.torchrun_launcher import TorchrunLauncher

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    file: Path
    address: str | None = None
    assumed: Inventory | None = None
    dry_run: bool = False
    resume: Path | None = None
    output: Path = Path("results")
    only: dict[str, Any] = field(default_factory=dict)
    no_user_code: bool = False


def run(request: Request, emit: Emit) -> int:
    """Plans, measures and reports; returns the exit code. Raises HarnessError where nothing was started."""
    began = time.time()
    experiment = load(request.file)
    if request.no_user_code:
        refuse_user_code(experiment, request.file)
    home = request.file.resolve().parent
    with ExitStack() as stack:
        if experiment.own_workload:
            stack.enter_context(_import_path(home))
        ray_cluster = _connect(request, experiment, home, stack)
        inventory = request.assumed or (ray_cluster.inventory if ray_cluster else cluster.local_inventory())
        plan = make_plan(experiment, inventory)
        plan = only(plan, request.only) if request.only else plan
        check_workloads(plan)
        check_optimizers(plan)
        check_target(experiment)
        emit(Planned(plan))
        if request.dry_run or request.assumed:
            return OK
        if not plan.trials:
            return FAILED  # the plan has told why; nothing is started
        _check_paths(plan, ray_cluster)
        if ray_cluster is None:
            download_data(plan)
        folder = _folder(request, experiment, plan)
        stack.enter_context(folder.locked())
        finished = True
        try:
            with _terminable(), _ray(ray_cluster, plan) as ready, ExitStack() as launched:
                launcher = _launcher(plan, ready, home, launched)
                # git runs what a repository's own settings name
                commit = None if request.no_user_code else git_commit(home)
                _measure(plan, folder, launcher, commit, began, emit)
        except KeyboardInterrupt:
            finished = False
            emit(Note(f"interrupted: what was finished is kept; go on with --resume {folder.path}"))
        _report(folder, began, emit)
    return _exit_code(folder, plan) if finished else INTERRUPTED


def _ray(ray_cluster: Cluster | None, plan: Plan) -> AbstractContextManager[Cluster | None]:
    """The cluster at the address, or a Ray of our own; none where no worker group of the plan is for it."""
    if ray_cluster or all(group.launcher != "ray" for group in plan.groups):
        return nullcontext(ray_cluster)
    return cluster.embedded(plan.inventory)


def _launcher(plan: Plan, ray_cluster: Cluster | None, home: Path, stack: ExitStack) -> Launcher:
    """Starts each worker group as its cells say. Idle, Ray takes no part in what torchrun starts."""
    own = str(home) if plan.experiment.own_workload else None
    torchrun = TorchrunLauncher(plan.experiment, plan.machine.threads_per_device, own)
    if ray_cluster is None:
        return torchrun
    from harness.ray_launcher import RayLauncher

    import_path = own if ray_cluster.embedded else None
    ray = stack.enter_context(closing(RayLauncher(ray_cluster, plan.experiment, plan.machine, import_path)))
    return ByLauncher({"ray": ray, "torchrun": torchrun})


def _measure(plan: Plan, folder: RunFolder, launcher: Launcher, commit: str | None, began: float, emit: Emit) -> None:
    """Every pending trial of the plan."""
    execution = Execution(plan, folder, launcher, emit)
    sitting = execution.sitting
    folder.set_sitting(sitting, {"started_at": began, "git_commit": commit, "command": sys.argv[1:]})
    emit(RunStarted(folder.path, execution.trials, execution.done))
    try:
        execution.run()
    finally:
        folder.set_sitting(sitting, {"wall_s": time.time() - began})


def _report(folder: RunFolder, began: float, emit: Emit) -> None:
    if not folder.lines():
        emit(Note(f"nothing was finished; {folder.path} holds the plan"))
        return
    results = write_report(folder.path)
    tables = {"scaling": results.scaling, "noise": results.noise, "trials": results.trials}
    emit(Reported(folder.path, folder.report, tables, time.time() - began))


def _exit_code(folder: RunFolder, plan: Plan) -> int:
    """0 where something was measured and all that was planned is ok or was skipped; else 1."""
    last = {line["trial_id"]: line["outcome"] for line in folder.lines()}
    # a check that cannot be made is a finding, no failure of what was asked for
    outcomes = [last.get(trial.id, "lost") for trial in plan.trials if trial.purpose != "equivalence"]
    measured = "ok" in outcomes
    return OK if measured and all(outcome in ("ok", "skipped") for outcome in outcomes) else FAILED


def _connect(request: Request, experiment: Experiment, home: Path, stack: ExitStack) -> Cluster | None:
    """The cluster at the address, where one is given; an assumed one needs none."""
    if request.address is None or request.assumed:
        return None
    return stack.enter_context(cluster.connected(request.address, home if experiment.own_workload else None))


def _folder(request: Request, experiment: Experiment, plan: Plan) -> RunFolder:
    """A new run folder, or the one to resume; raises RunFolderError where it holds another experiment."""
    if request.resume is None:
        return RunFolder.create(request.output, experiment, plan, request.file.read_text(encoding="utf-8"))
    folder = RunFolder.open(request.resume)
    then, now = (redact.plain(e.model_dump(mode="json", exclude={"limits"})) for e in (folder.experiment(), experiment))
    different = [key for key in now if then.get(key) != now[key]]
    if different:
        raise RunFolderError(
            f"{request.resume} was made by another experiment: {', '.join(different)} differ from {request.file}. "
            f"Resume with the file that made it ({folder.path / 'experiment.yaml'} is a copy), or start a new run"
        )
    return folder


def _check_paths(plan: Plan, ray_cluster: Cluster | None) -> None:
    """Data is where the experiment says, on every node, before the first trial; raises WorkloadError."""
    paths = data_paths(plan.experiment, [trial.cell for trial in plan.trials])
    here = [path for path in paths if not os.path.exists(path)]
    missing = ray_cluster.missing_paths(paths) if ray_cluster else {"this machine": here} if here else {}
    if missing:
        raise missing_data(missing)


@contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """The experiment file's folder is where a user's own workload is found."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as a batch system sends it, ends a run as Ctrl-C does: with what was finished, and a report."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    from harness.cli import run_main

    run_main()
