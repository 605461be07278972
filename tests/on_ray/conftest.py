"""One embedded cluster for all tests here: what they share is Ray, not worker groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import harness
from harness.analysis.results import Results
from harness.config.experiment import Experiment
from harness.launch.ray import cluster
from harness.launch.ray.cluster import Cluster
from harness.plan.planner import Plan, make_plan
from harness.record.folder import RunFolder
from harness.run.events import Event
from harness.run.execution import Execution

TESTS = Path(__file__).parents[1]
Executed = tuple[Results, list[Event]]
Execute = Callable[[Experiment], Executed]


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    with cluster.start_embedded(cluster.local_inventory()) as ready:
        yield ready


@pytest.fixture(scope="package")
def execute(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Execute]:
    """Runs an experiment on the shared cluster and loads what it left."""
    from harness.launch.ray.launcher import RayLauncher

    def run(experiment: Experiment) -> Executed:
        plan: Plan = make_plan(experiment, ray_cluster.inventory)
        folder = RunFolder.create(tmp_path_factory.mktemp("run"), experiment, plan, "x: y\n")
        launcher = RayLauncher(ray_cluster, experiment, plan.machine, str(TESTS))
        events: list[Event] = []
        Execution(plan, folder, launcher, events.append).run()
        launcher.close()
        return harness.load(folder.path), events

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TESTS))
        yield run
