"""What a run and the doctor share: the checked plan of an experiment, its cluster, its launchers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment
from harness.errors import WorkloadError
from harness.launch.protocol import ByLauncher, Launcher
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.launch.torchrun.launcher import TorchrunLauncher
from harness.plan.checks import versions
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, filter_plan, make_plan, without_doctor_trials
from harness.run.validation import (
    check_optimizers,
    check_target,
    check_workloads,
    data_paths,
    download_data,
    missing_data,
)
from harness.train import workloads


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    file: Path
    address: str | None = None
    assumed: Inventory | None = None
    dry_run: bool = False
    resume: Path | None = None
    add_blocks: int = 0
    output: Path = Path("results")
    only: dict[str, Any] = field(default_factory=dict)
    no_user_code: bool = False
    preflight: bool = True


def connect(request: Request, experiment: Experiment, home: Path, stack: ExitStack) -> Cluster | None:
    """The cluster at the address, where one is given; an assumed one needs none."""
    if request.address is None or request.assumed:
        return None
    return stack.enter_context(cluster.connect(request.address, home if experiment.own_workload else None))


def make_checked_plan(request: Request, experiment: Experiment, ray_cluster: Cluster | None) -> Plan:
    """The part of the plan that is asked for, what it names looked at; raises HarnessError."""
    inventory = request.assumed or (ray_cluster.inventory if ray_cluster else cluster.local_inventory())
    plan = make_plan(experiment, inventory)
    plan = filter_plan(plan, request.only) if request.only else plan
    plan = plan if request.preflight else without_doctor_trials(plan)
    check_workloads(plan)
    check_optimizers(plan)
    check_target(experiment)
    return plan


def check_paths(plan: Plan, ray_cluster: Cluster | None) -> None:
    """Data is where the experiment says, on every node, or is fetched to this one; raises WorkloadError."""
    paths = data_paths(plan.experiment, [trial.cell for trial in plan.trials])
    here = [path for path in paths if not os.path.exists(path)]
    missing = ray_cluster.missing_paths(paths, _used(plan)) if ray_cluster else {"this machine": here} if here else {}
    if missing:
        raise missing_data(missing)
    if ray_cluster is None:
        download_data(plan)


def failing_imports(plan: Plan, ray_cluster: Cluster | None) -> dict[str, dict[str, str]]:
    """By host, the modules of the harness and of the workload that cannot be imported there, and why."""
    if ray_cluster is None:
        return {}
    modules = {workloads.module_of(trial.cell.workload) for trial in plan.trials}
    return ray_cluster.failing_imports(["harness.launch.worker", *sorted(modules)], _used(plan))


def _used(plan: Plan) -> list[bool]:
    """Of each node whether a worker group may go there: none goes to a node without the devices that are asked for."""
    return [devices > 0 for devices in plan.machine.devices_per_node]


def check_imports(plan: Plan, ray_cluster: Cluster | None) -> None:
    """What the ranks need can be imported on every node; raises WorkloadError."""
    for finding in versions.cannot_import(failing_imports(plan, ray_cluster)):
        raise WorkloadError(f"{finding.seen}; {finding.means}: {finding.advice}")


def start_ray(ray_cluster: Cluster | None, plan: Plan) -> AbstractContextManager[Cluster | None]:
    """The cluster at the address, or a Ray of our own; none where no worker group of the plan is for it."""
    if ray_cluster or all(group.launcher != "ray" for group in plan.groups):
        return nullcontext(ray_cluster)
    return cluster.start_embedded(plan.inventory)


def launcher_for(plan: Plan, ray_cluster: Cluster | None, home: Path, stack: ExitStack) -> Launcher:
    """Starts each worker group as its cells say. Idle, Ray takes no part in what torchrun starts."""
    own = str(home) if plan.experiment.own_workload else None
    torchrun = TorchrunLauncher(plan.experiment, plan.machine.threads_per_device, own)
    if ray_cluster is None:
        return torchrun
    from harness.launch.ray.launcher import RayLauncher

    import_path = own if ray_cluster.embedded else None
    ray = stack.enter_context(closing(RayLauncher(ray_cluster, plan.experiment, plan.machine, import_path)))
    return ByLauncher({"ray": ray, "torchrun": torchrun})


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """The experiment file's folder is where a user's own workload is found."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
