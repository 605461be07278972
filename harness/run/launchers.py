"""The launchers of a plan's worker groups, and the Ray that they need."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path

from harness.launch.protocol import ByLauncher, Launcher
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.launch.torchrun.launcher import TorchrunLauncher
from harness.plan.planner import Plan
from harness.run.events import Emit, Note
from harness.run.variants import on_nodes, own_folder_on_nodes


def start_ray(ray_cluster: Cluster | None, plan: Plan) -> AbstractContextManager[Cluster | None]:
    """Return the connected cluster, or start an embedded one; None if no worker group of the plan needs Ray."""
    if ray_cluster or all(group.launcher != "ray" for group in plan.groups):
        return nullcontext(ray_cluster)
    return cluster.start_embedded(plan.inventory)


def inline_launcher(plan: Plan) -> Launcher:
    """Run every worker group in this process, for a debugger."""
    from harness.launch.inline import InlineLauncher  # and with it torch

    return InlineLauncher(plan.experiment, plan.machine.threads_per_device, marked=True)


def launcher_for(
    plan: Plan, ray_cluster: Cluster | None, home: Path, stack: ExitStack, emit: Emit, holds: bool = False
) -> Launcher:
    """Return the launcher of the plan's worker groups. Idle, Ray takes no part in groups that torchrun starts.

    ``holds``: the next trial starts once the driver has handled the result of the last one; torchrun always does so.
    """
    own = str(home) if plan.experiment.own_code and not plan.variants else None
    versions = {name: own.version for name, own in plan.variants.items()}
    torchrun = TorchrunLauncher(plan.experiment, plan.machine.threads_per_device, own, versions)
    if ray_cluster is None:
        return torchrun
    from harness.launch.ray.launcher import RayLauncher  # and with it ray.train, which takes seconds

    if not ray_cluster.embedded:
        own, versions = own_folder_on_nodes(plan.experiment, home), on_nodes(plan.variants)
    placements = [group.placement for group in plan.groups]

    def say(text: str) -> None:
        emit(Note(text))

    launcher = RayLauncher(ray_cluster, plan.experiment, plan.machine, own, versions, placements, holds, say)
    ray = stack.enter_context(closing(launcher))
    return ByLauncher({"ray": ray, "torchrun": torchrun})
