"""The checked plan of an experiment and its cluster, shared by runs, plans and the doctor."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import Experiment
from harness.config.script import ScriptExperiment
from harness.errors import ClusterError, Collected, ExperimentError, RunFolderError, WorkloadError, nearest
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.plan.cell import Cell
from harness.plan.checks import cannot_import
from harness.plan.grid import NO_TRAITS, NO_VARIANTS, Variants
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, filter_plan, make_plan, single_rank_only
from harness.record.folder import RunFolder
from harness.run.events import Emit
from harness.run.growth import GrowingRay, Wait
from harness.run.request import Request
from harness.run.resume import check_measures, check_variants, reopen
from harness.run.variants import (
    on_nodes,
    only_version,
    own_codes,
    own_folder_on_nodes,
    own_traits,
    shipped_folders,
    with_own_code,
)
from harness.system.user_code import load_from
from harness.train import workloads
from harness.train.optimizers import make_optimizer, make_schedule, rejected
from harness.train.workloads.datasets import CIFAR10_FOLDER, CIFAR10_HINT

MOST_REASONS = 3
"""The number of reasons in the message that no cell can run."""


class Prepared(NamedTuple):
    """A checked plan, the cluster at the request's address, and the run folder that is resumed."""

    plan: Plan
    ray_cluster: Cluster | None
    folder: RunFolder | None


def prepare(request: Request, experiment: Experiment, stack: ExitStack, emit: Emit) -> Prepared:
    """Return the checked plan of a request; starts nothing. Raises HarnessError.

    ``stack`` holds the lock on a resumed folder, the import path, the connection, and the request for nodes.
    """
    home = request.home
    folder = None
    if request.resume:
        stack.enter_context(nullcontext() if request.plans_only else RunFolder.open(request.resume).locked())
        folder, experiment = reopen(request.resume, request.file, experiment, request.add_blocks)
        if any(line["facts"].get("inline") or line["skip_code"] == "inline" for line in folder.trial_lines()):
            raise RunFolderError(f"{request.resume}: --inline made this run for a debugger; start a new run instead")
    own_path = experiment.own_modules and not experiment.variants  # those are imported in processes of their own
    stack.enter_context(import_path(home) if own_path else nullcontext())
    ray_cluster = None
    if request.address is not None and not request.assumed:
        ray_cluster = stack.enter_context(cluster.connect(request.address, shipped_folders(experiment, home)))
    plan, ray_cluster = _planned(request, experiment, ray_cluster, stack, emit)
    if folder:
        check_measures(folder)
        check_variants(folder, plan)
    if request.inline:
        plan = single_rank_only(plan)
        stack.enter_context(only_version(plan))
    return Prepared(plan, ray_cluster, folder)


def _planned(
    request: Request, experiment: Experiment, ray_cluster: Cluster | None, stack: ExitStack, emit: Emit
) -> tuple[Plan, Cluster | None]:
    """Return the checked plan and the cluster, after the nodes have come that the experiment waits for."""
    variants = own_codes(experiment, request.home)

    def plan_on(experiment: Experiment, inventory: Inventory) -> Plan:
        return make_checked_plan(request, experiment, inventory, variants)

    if ray_cluster is None or experiment.cluster is None or request.plans_only:
        inventory = ray_cluster.inventory if ray_cluster else cluster.local_inventory()
        return plan_on(experiment, request.assumed or inventory), ray_cluster
    plan_on(experiment, ray_cluster.inventory)  # what is wrong with the file is known before the wait
    growing = GrowingRay(ray_cluster, stack)
    plan = Wait(growing, experiment.cluster.wait_for, emit).plan(experiment, plan_on)
    return plan, growing.cluster


def make_checked_plan(
    request: Request, experiment: Experiment, inventory: Inventory, variants: Variants = NO_VARIANTS
) -> Plan:
    """Return the requested part of the plan; raises HarnessError, which names every mistake.

    Checks workloads, optimizers and the target.
    """
    found = Collected()
    traits = NO_TRAITS if variants else own_traits(experiment, found)
    with found.also():
        plan = make_plan(experiment, inventory, traits, variants)
        with found.also():
            plan = _requested(request, plan)
        if isinstance(experiment, ScriptExperiment):
            if experiment.loop:
                load_from(experiment.loop, "function", what=f"loop {experiment.loop!r}")
        else:
            with found.also():
                check_optimizers(plan)
            with_own_code(check_code, plan)
    found.raise_all()
    return plan


def _requested(request: Request, plan: Plan) -> Plan:
    plan = filter_plan(plan, request.only) if request.only else plan
    plan = plan if request.bases else plan.keeping(lambda trial: not trial.added)
    plan = plan if request.preflight else plan.keeping(lambda trial: trial.purpose != "doctor")
    if not request.links:
        return plan
    plan = replace(plan.keeping(lambda trial: trial.purpose == "links"), skips={}, impossible={})
    if not plan.trials:
        needed = "ddp or fsdp on at least 2 devices, or dp on at least 2 GPUs"
        raise ExperimentError("--links", [f"no cell of {request.file} that can run here has links; allowed: {needed}"])
    return plan


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """Put the experiment file's folder, which may hold the user's own code, first on the import path."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def check_code(plan: Plan) -> None:
    """Raise WorkloadError if the user's code cannot be imported, or does not accept what the experiment asks of it."""
    workloads.load_class(plan.experiment.workload)  # once, if it cannot be imported
    found, cells = Collected(), dict[tuple[object, ...], Cell]()
    for cell in (trial.cell for trial in plan.trials):
        cells.setdefault((cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items()))), cell)
    for cell in cells.values():
        with found.also():
            workloads.build(cell)  # once for each set of parameters; data are not read
    with found.also():
        check_target(plan.experiment)
    found.raise_all()


def check_optimizers(plan: Plan) -> None:
    """Raise WorkloadError if some optimizer or schedule that the file names fails in a step on one weight."""
    found, cells = Collected(), dict[tuple[str, str], Cell]()
    own = set[str]()  # what the workloads make themselves; those that vary are imported in other processes alone
    for name in () if plan.variants else {trial.cell.workload for trial in plan.trials}:
        with suppress(WorkloadError):  # which check_code() reports
            found_class = workloads.load_class(name)
            own |= {method for method in ("optimizer", "schedule") if callable(getattr(found_class, method, None))}
    advice = {section: _if_names_vary(plan, section) for section in ("optimizer", "schedule")}
    for cell in (trial.cell for trial in plan.trials):
        cells.setdefault((repr(sorted(cell.optimizer.items())), repr(sorted(cell.schedule.items()))), cell)
    for cell in cells.values():
        model = nn.Linear(1, 1)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters())  # of a schedule whose optimizer is wrong
        with found.also(advice["optimizer"]):
            optimizer = optimizer if "optimizer" in own else make_optimizer(model, cell.optimizer)
            model(torch.ones(1, 1)).sum().backward()
            try:
                optimizer.step()
            except Exception as error:
                raise rejected("optimizer", cell.optimizer, error) from None
        with found.also(advice["schedule"]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an optimizer that failed has taken no step
            schedule = None if "schedule" in own else make_schedule(optimizer, cell.schedule)
            try:
                if schedule:
                    schedule.step()
            except Exception as error:
                raise rejected("schedule", cell.schedule, error) from None
    found.raise_all()


def _if_names_vary(plan: Plan, section: str) -> str:
    """Return advice if the names of optimizers or schedules are an axis: all values share the other options."""
    names = {trial.cell.axis(f"{section}.name") for trial in plan.trials}
    known = sorted(str(name) for name in names if name is not None)  # diagnostic cells may have no schedule
    if len(known) < 2:
        return ""
    return (
        f". The options of {section} hold for each of {', '.join(known)}: give one with other options a grid "
        f"of its own below cells, with {section}.name and its options"
    )


def check_target(experiment: Experiment) -> None:
    """Raise WorkloadError if the target's metric is no column that the epochs will have; a script's are unknown."""
    settings = experiment.convergence
    if settings is None or settings.target is None or isinstance(experiment, ScriptExperiment):
        return
    known = ["train_loss", "val_loss"]
    found = workloads.load_class(experiment.workload)
    names = getattr(found, "metric_names", None)
    known += [f"val_{name}" for name in names or ()]
    unnamed = names is None and any(
        callable(getattr(found, method, None)) for method in ("metrics", "derived", "evaluate")
    )
    metric = settings.target.metric
    if metric not in known and not (unnamed and metric.startswith("val_")):
        hint = ", or val_<name> of your own metrics" if unnamed else ""
        raise WorkloadError(f"convergence.target.metric: got {metric!r}; {nearest(metric, known)}{hint}")


def check_runnable(request: Request, plan: Plan) -> None:
    """Raise ClusterError, with the most frequent reasons, if no cell of the plan can run here."""
    if plan.trials:
        return
    reasons = {**{trial.cell: reason for trial, reason in plan.skips.items()}, **plan.impossible}
    counts = Counter(reason.text for reason in reasons.values()).most_common()
    listed = "; ".join(f"{reason} ({count} cell{'s' * (count > 1)})" for reason, count in counts[:MOST_REASONS])
    more = f"; {len(counts) - MOST_REASONS} more, which harness plan shows" if len(counts) > MOST_REASONS else ""
    raise ClusterError(f"{request.file}: no cell can run on {plan.inventory}: {listed}{more}. Nothing was started")


def download_data(plan: Plan) -> None:
    """Download the data of workloads with ``download: true``, each once, to this machine; raises WorkloadError."""
    cells = {trial.cell.data: trial.cell for trial in plan.trials if trial.cell.workload_options.get("download")}
    for cell in cells.values():
        workloads.build(cell).datasets()


def data_paths(cells: Iterable[Cell]) -> list[str]:
    """Return every path that the cells read data from, except of data that are downloaded."""
    paths: dict[str, None] = {}
    for cell in cells:
        if cell.data and "/" in cell.data:
            paths[cell.data] = None
        folder = cell.workload_options.get("data_folder")
        cifar10, own = cell.data == "cifar10", cell.workload not in BUILTIN_WORKLOADS
        if isinstance(folder, str) and (cifar10 or own) and not cell.workload_options.get("download"):
            paths[f"{folder}/{CIFAR10_FOLDER}" if cifar10 else folder] = None
    return [str(Path(path).expanduser()) for path in paths]


def check_paths(plan: Plan, ray_cluster: Cluster | None) -> None:
    """Raise WorkloadError if a node lacks the experiment's data; downloads them to this one if the file says so."""
    paths = [*data_paths(trial.cell for trial in plan.trials), *plan.experiment.programs]
    here = [path for path in paths if not os.path.exists(path)]
    missing = ray_cluster.missing_paths(paths, _used(plan)) if ray_cluster else {"this machine": here} if here else {}
    if missing:
        where = "; ".join(f"{', '.join(lacking)} on {node}" for node, lacking in missing.items())
        cifar10 = any(path.endswith(CIFAR10_FOLDER) for lacking in missing.values() for path in lacking)
        hint = f". {CIFAR10_HINT}" if cifar10 else ""
        raise WorkloadError(f"files are missing: {where}. The same path must exist on every node{hint}")
    if ray_cluster is None and any(trial.cell.workload_options.get("download") for trial in plan.trials):
        with_own_code(download_data, plan)


def failing_imports(plan: Plan, ray_cluster: Cluster | None, home: Path) -> dict[str, dict[str, str]]:
    """Return, by host, each module that cannot be imported there, with the error.

    ``home``: the experiment file's folder.
    """
    if ray_cluster is None:
        return {}
    own = plan.experiment.own_modules
    of_script = isinstance(plan.experiment, ScriptExperiment)
    modules = {*own, *(workloads.module_of(trial.cell.workload) for trial in plan.trials if not of_script)}
    needed, used = ["harness.launch.worker", *sorted(modules)], _used(plan)
    if not plan.variants:
        return ray_cluster.failing_imports(needed, used, folder=own_folder_on_nodes(plan.experiment, home))
    failing: dict[str, dict[str, str]] = {}
    for name, version in on_nodes(plan.variants).items():
        for host, errors in ray_cluster.failing_imports(needed, used, version).items():
            failing.setdefault(host, {}).update({f"{module} ({name})": error for module, error in errors.items()})
    return failing


def _used(plan: Plan) -> list[bool]:
    """Return for each node whether worker groups may use it: whether it has some of the requested devices."""
    return [devices > 0 for devices in plan.machine.devices_per_node]


def check_imports(plan: Plan, ray_cluster: Cluster | None, home: Path) -> None:
    """Raise WorkloadError if a module that the ranks need cannot be imported on some node."""
    for finding in cannot_import(failing_imports(plan, ray_cluster, home)):
        raise WorkloadError(f"{finding.seen}; {finding.means}: {finding.advice}")
