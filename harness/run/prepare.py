"""The checked plan of an experiment and its cluster, shared by runs, plans and the doctor."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from harness.config.experiment import Experiment
from harness.errors import ClusterError, Collected, ExperimentError, RunFolderError, WorkloadError
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.plan.checks import versions
from harness.plan.grid import NO_TRAITS, NO_VARIANTS, Variants
from harness.plan.inventory import Inventory
from harness.plan.planner import (
    Plan,
    filter_plan,
    make_plan,
    only_links_trials,
    single_rank_only,
    without_doctor_trials,
)
from harness.record.folder import RunFolder
from harness.run.events import Emit
from harness.run.growth import GrowingRay, Wait
from harness.run.request import Request
from harness.run.resume import check_meanings, check_variants, reopen
from harness.run.validation import (
    check_code,
    check_optimizers,
    data_paths,
    download_data,
    missing_data,
    own_traits,
)
from harness.run.variants import (
    on_nodes,
    only_version,
    own_codes,
    own_folder_on_nodes,
    shipped_folders,
    with_own_code,
)
from harness.train import workloads

MOST_REASONS = 3
"""The number of reasons in the message that no cell can run."""


@dataclass(frozen=True)
class Prepared:
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
        if any(line["facts"].get("inline") or line["skip_code"] == "inline" for line in folder.lines()):
            raise RunFolderError(f"{request.resume}: --inline made this run for a debugger; start a new run instead")
    own_path = experiment.own_code and not experiment.variants  # those are imported in processes of their own
    stack.enter_context(import_path(home) if own_path else nullcontext())
    ray_cluster = connect(request, experiment, home, stack)
    plan, ray_cluster = _planned(request, experiment, ray_cluster, stack, emit)
    if folder:
        check_meanings(folder, plan)
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


def connect(request: Request, experiment: Experiment, home: Path, stack: ExitStack) -> Cluster | None:
    """Return the cluster at the request's address; None without an address, or if a cluster is assumed."""
    if request.address is None or request.assumed:
        return None
    return stack.enter_context(cluster.connect(request.address, shipped_folders(experiment, home)))


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
        with found.also():
            check_optimizers(plan)
        with_own_code(check_code, plan)
    found.raise_all()
    return plan


def _requested(request: Request, plan: Plan) -> Plan:
    plan = filter_plan(plan, request.only) if request.only else plan
    plan = plan if request.preflight else without_doctor_trials(plan)
    plan = only_links_trials(plan) if request.links else plan
    check_links(request, plan)
    return plan


def check_links(request: Request, plan: Plan) -> None:
    """Raise ExperimentError if only links are to be measured and the plan has none."""
    if request.links and not plan.trials:
        needed = "ddp or fsdp on at least 2 devices, or dp on at least 2 GPUs"
        raise ExperimentError("--links", [f"no cell of {request.file} that can run here has links; allowed: {needed}"])


def check_runnable(request: Request, plan: Plan) -> None:
    """Raise ClusterError, with the most frequent reasons, if no cell of the plan can run here."""
    if plan.trials:
        return
    skipped = [(skip.trial.cell, skip.reason) for skip in plan.skips]
    cells = dict.fromkeys([*skipped, *((each.cell, each.reason) for each in plan.impossible)])
    counts = Counter(reason for _, reason in cells).most_common()
    reasons = "; ".join(f"{reason} ({count} cell{'s' * (count > 1)})" for reason, count in counts[:MOST_REASONS])
    more = f"; {len(counts) - MOST_REASONS} more, which harness plan shows" if len(counts) > MOST_REASONS else ""
    raise ClusterError(f"{request.file}: no cell can run on {plan.inventory}: {reasons}{more}. Nothing was started")


def check_paths(plan: Plan, ray_cluster: Cluster | None) -> None:
    """Raise WorkloadError if a node lacks the experiment's data; downloads them to this one if the file says so."""
    paths = data_paths(plan.experiment, [trial.cell for trial in plan.trials])
    here = [path for path in paths if not os.path.exists(path)]
    missing = ray_cluster.missing_paths(paths, _used(plan)) if ray_cluster else {"this machine": here} if here else {}
    if missing:
        raise missing_data(missing)
    if ray_cluster is None and any(trial.cell.workload_options.get("download") for trial in plan.trials):
        with_own_code(download_data, plan)


def failing_imports(plan: Plan, ray_cluster: Cluster | None, home: Path) -> dict[str, dict[str, str]]:
    """Return, by host, each module that cannot be imported there, with the error.

    ``home``: the experiment file's folder.
    """
    if ray_cluster is None:
        return {}
    modules = {workloads.module_of(trial.cell.workload) for trial in plan.trials}
    modules |= {name.partition(":")[0] for name in plan.experiment.own_strategies}
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
    for finding in versions.cannot_import(failing_imports(plan, ray_cluster, home)):
        raise WorkloadError(f"{finding.seen}; {finding.means}: {finding.advice}")


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """Put the experiment file's folder, which may hold the user's own code, first on the import path."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
