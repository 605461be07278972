"""Real Ray and real worker processes on one embedded cluster. What fails there is in test_faults."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import product
from typing import Any

import psutil
import pytest
from ray.util import placement_group_table

from harness.errors import ClusterLostError
from harness.launch.protocol import GroupStarted, TrialStarted
from harness.launch.ray.cluster import Cluster
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.report.html import write_report
from harness.system.process import variables
from tests.cluster.machines import wait_for
from tests.conftest import experiment_of
from tests.on_ray.conftest import TESTS

pytestmark = pytest.mark.slow

QUICK = {"blocks": 1, "warmup_steps": 2, "windows": 2, "window_steps": 4, "window_seconds": 0.0}


def test_the_environment_is_as_it_was_after_an_embedded_cluster() -> None:
    before = dict(os.environ)
    with variables({"RAY_AUTH_TOKEN": "x", "HOME": "elsewhere"}):
        assert os.environ["RAY_AUTH_TOKEN"] == before.get("RAY_AUTH_TOKEN", "x")
        assert os.environ["HOME"] == before["HOME"]
    assert dict(os.environ) == before


def test_ranks_devices_and_threads_are_recorded(execute: Any, ray_cluster: Cluster, no_figures: None) -> None:
    grid = {"strategy": ["single", "dp", "ddp", "fsdp"], "devices": [1, 2], "per_device_batch_size": 8}
    shared = {"cells": [{"strategy": "ddp", "devices": 4, "per_device_batch_size": 8}], "oversubscribe": True}
    results, _ = execute(experiment_of(grid, workload="ray_workload:ConfiguredFault", throughput=QUICK, **shared))
    ok = results.trials[results.trials["outcome"] == "ok"]
    placed = [*product(("dp", "ddp", "fsdp"), (1, 2)), ("ddp", 4), ("single", 1)]
    assert sorted(zip(ok["strategy"], ok["devices"], strict=True)) == sorted(placed)
    ranks = results.ranks.merge(ok[["trial_id", "strategy", "devices"]], on="trial_id", suffixes=("_held", ""))
    two = ranks[(ranks["devices"] == 2) & (ranks["strategy"] == "ddp")]
    assert two[["rank", "local_rank", "node_rank"]].to_numpy().tolist() == [[0, 0, 0], [1, 1, 0]]
    assert ranks[(ranks["devices"] == 2) & (ranks["strategy"] == "dp")]["devices_held"].tolist() == ["cpu, cpu"]
    assert results.ranks["threads"].nunique() == 1
    assert (ok["throughput_per_s"] > 0).all() and (ok["peak_memory_bytes"] > 0).all()
    steps = results.steps.merge(ok[["trial_id", "devices", "strategy"]], on="trial_id")
    assert set(steps[~steps["warmup"]].groupby("trial_id").size()) == {2 * 4}
    one, several = steps[steps["devices"] == 1], steps[steps["devices"] > 1]
    assert set(one["rank"]) == {0} and (one["mean_s"] == one["step_s"]).all()
    assert (several["mean_s"] <= several["step_s"]).all() and set(several["rank"]) <= {0, 1, 2, 3}
    quantiles = ranks[ranks["rank"] > 0][["step_p5_s", "step_s", "step_p95_s"]].dropna()
    assert len(quantiles) and (quantiles.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    groups = results.environment["groups"]
    assert all(group["nodes"][0]["threads"] == ranks["threads"].iloc[0] for group in groups)
    parts = ["controller", "resources", "worker start", "process group", "first word", "teardown"]
    assert all(list(group["parts"]) == parts for group in groups)
    # as a training that torchrun starts: Ray would have its workers yield to every other process
    assert {group["nodes"][0]["niceness"] for group in groups} == {os.nice(0)}
    cores = ray_cluster.inventory.nodes[0].cores
    shared = ok[ok["oversubscribed"].fillna(False)]
    assert set(zip(shared["strategy"], shared["devices"], strict=True)) == ({("ddp", 4)} if cores < 4 else set())
    assert len(ranks[(ranks["devices"] == 4)]) == 4
    write_report(results.folder.path)
    assert ("oversubscribed" in results.folder.report.read_text()) == (cores < 4)


def small_group(ready: Cluster, *behaviours: str) -> tuple[Any, Any]:
    """A launcher on the cluster, and a group of one rank with a trial of each behaviour, in this order."""
    from harness.launch.ray.launcher import RayLauncher

    grid = {"strategy": "single", "per_device_batch_size": 8, "workload.behaviour": list(behaviours)}
    workload = {"workload": "ray_workload:ConfiguredFault", "optimizer": {"name": "SGD", "lr": 0.01}}
    experiment = experiment_of(grid, throughput=QUICK, limits={"trial": 60}, **workload)
    plan = make_plan(experiment, ready.inventory)
    (group,) = plan.groups
    trials = sorted(group.trials, key=lambda trial: behaviours.index(trial.cell.workload_options["behaviour"]))
    return RayLauncher(ready, experiment, plan.machine, str(TESTS)), replace(group, trials=tuple(trials))


def test_a_dead_agent_is_replaced_if_its_node_is_alive_and_a_killed_rank_without_peers_is_a_lost_trial(
    ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one group: the agent is killed in the first trial, and the rank in the second one, which hangs until then."""
    import ray

    from harness.launch.ray.nodes import ask_agents

    monkeypatch.syspath_prepend(str(TESTS))
    launcher, group = small_group(ray_cluster, "fine", "hangs")
    ((node, agent),) = ray_cluster.agents.items()
    pid, rows = 0, list[TrialResult]()
    for message in launcher.launch(group, deadline=None):
        if isinstance(message, GroupStarted):
            pid = message.ranks[0]["pid"]
        if isinstance(message, TrialStarted) and message.trial_id == group.trials[0].id:
            ray.kill(agent)
        elif isinstance(message, TrialStarted):
            os.kill(pid, signal.SIGKILL)
        rows += [message] if isinstance(message, TrialResult) else []
    (cores,) = launcher.busy_cores().values()
    launcher.close()
    assert 0.0 <= cores <= (os.cpu_count() or 1)
    assert [row.outcome for row in rows] == ["ok", "lost"]
    assert rows[1].error_rank == 0 and "the process of rank 0 terminated" in rows[1].reason
    assert 0.0 <= rows[1].facts["freed_s"] < 30.0  # a collective would wait for minutes
    assert ask_agents(ray_cluster, "alive", [(node, os.getpid()), (node, 2**22 + 1)]) == [True, False]
    assert ray_cluster.agents[node] is not agent
    assert ask_agents(ray_cluster, "alive", [("no such node", 1)]) == [None]


def test_a_killed_mailbox_loses_a_trial_and_ends_ranks(ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from harness.launch.mailbox import Mailbox

    monkeypatch.syspath_prepend(str(TESTS))
    own = ray.remote(num_cpus=0, max_concurrency=4)(Mailbox).remote()
    launcher, group = small_group(replace(ray_cluster, mailbox=own), "fine", "diverges")
    pids = []
    with pytest.raises(ClusterLostError, match=r"the run's mailbox on Ray is gone \(ActorDiedError\)"):
        for message in launcher.launch(group, deadline=None):
            if isinstance(message, GroupStarted):
                pids = [row["pid"] for row in message.ranks]
                ray.kill(own)
    launcher.close()
    assert pids
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 30, pids)
    states = {each["state"] for each in placement_group_table().values()}
    assert states == {"REMOVED"}, "no device is held: another run of this process starts at once"
