"""The whole pipeline on a real cluster of two Ray nodes, 127.0.0.2 and 127.0.0.3, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import harness
from harness.analysis.results import Results
from harness.errors import ClusterError
from harness.launch.ray.session import check_reachable
from tests.cluster.machines import wait_for
from tests.listening import free_port
from tests.processes import RUN, ended
from tests.ray_nodes import ended_afterwards, of_the_cluster, own_variables, start_node

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
WORKERS_GONE_S = 30.0
COMMAND = (sys.executable, "-m", "harness.run")
EXPERIMENT = """
name: two
workload: ray_workload:ConfiguredFault
grid: {strategy: [single, ddp], devices: [1, 2], nodes: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 1, warmup_steps: 2, windows: 1, window_steps: 4, window_seconds: 0, twin: false, traces: false}
convergence: {epochs: 1, seeds: [0], only: {strategy: ddp, nodes: 2}}
optimizer: {name: SGD, lr: 0.01}
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return own_variables()


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """A head and a second node, one CPU each."""
    port = free_port(HEAD)
    head = ("--head", f"--node-ip-address={HEAD}", f"--port={port}", "--num-cpus=1", "--include-dashboard=false")
    other = (f"--address={HEAD}:{port}", f"--node-ip-address={OTHER}", "--num-cpus=1")
    with ended_afterwards(environment["RAY_AUTH_TOKEN"]):
        start_node(*head, variables=environment)
        start_node(*other, variables={**environment, "A_NODE_WITHOUT_IT": "1"})
        yield f"{HEAD}:{port}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("two")
    shutil.copy(HERE / "ray_workload.py", home)
    (home / "two.yaml").write_text(EXPERIMENT)
    return home


@pytest.fixture(scope="module")
def killed(home: Path, address: str, environment: dict[str, str]) -> SimpleNamespace:
    """A run whose driver was ended by SIGKILL: what it had recorded, and its workers, of which none was left later."""
    command = [*RUN, "two.yaml", "--address", address, "--output", "out", "--quiet"]
    token = environment["RAY_AUTH_TOKEN"]
    result = {**environment, "PYTHONPATH": str(HERE.parent)}
    run = subprocess.Popen(command, env=result, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        working: set[int] = set()
        wait_for(lambda: bool(_lines(home)) and bool(working.update(p.pid for p in workers(token)) or working), 400)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not workers(token), WORKERS_GONE_S, lambda: [process.cmdline() for process in workers(token)])
    return SimpleNamespace(lines=_lines(home), workers=working)


@pytest.fixture(scope="module")
def results(killed: object, home: Path, address: str, environment: dict[str, str]) -> Results:
    """The same run, gone on with to its end."""
    (folder,) = (home / "out" / "two").iterdir()
    ended(*RUN, "two.yaml", "--address", address, "--resume", folder, cwd=home, variables=environment)
    return harness.load(folder)


def workers(token: str) -> list[psutil.Process]:
    """Ray Train's living worker processes of the cluster with this token."""
    found = []
    for process in of_the_cluster(token):
        with suppress(psutil.Error):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_killed_driver_leaves_and_loses_nothing(killed: SimpleNamespace, results: Results, home: Path) -> None:
    assert killed.workers
    assert killed.lines and _lines(home)[: len(killed.lines)] == killed.lines  # as the file has them
    assert results.missing.empty
    again = [(line["trial_id"], line["invocation"]) for line in results.lines]
    assert len(again) == len(set(again))


def test_ddp_spans_both_nodes_with_the_right_ranks_and_their_interface_is_recorded(results: Results) -> None:
    ddp = results.trials[(results.trials["strategy"] == "ddp") & (results.trials["nodes"] == 2)]
    ddp = ddp[(ddp["devices"] == 2) & (ddp["outcome"] == "ok") & ~ddp["purpose"].isin(["doctor", "links"])]
    ddp = ddp.drop_duplicates("trial_id", keep="last")
    assert sorted(ddp["kind"]) == ["convergence", "diagnostic", "throughput"]
    ranks = results.ranks[results.ranks["trial_id"].isin(ddp["trial_id"])].sort_values(["trial_id", "rank"])
    assert ranks[["rank", "local_rank", "node_rank"]].to_numpy().tolist() == [[0, 0, 0], [1, 0, 1]] * 3
    for _, trial in ranks.groupby("trial_id"):
        assert set(trial["address"]) == {HEAD, OTHER} and trial["node_id"].nunique() == 2
    spanning = [group for group in results.environment["groups"] if len(group["nodes"]) == 2]
    assert spanning
    assert {node["variables"]["GLOO_SOCKET_IFNAME"] for node in spanning[0]["nodes"]} == {"lo"}


def test_ddp_over_both_nodes_trains_as_one_device_does(results: Results) -> None:
    checked = results.equivalence[results.equivalence["nodes"] == 2]
    assert checked["strategy"].tolist() == ["ddp"]
    assert checked["equivalent"].all(), checked["reason"].tolist()


def test_the_link_between_the_nodes_is_measured_once(results: Results) -> None:
    measured = results.trials[results.trials["purpose"] == "links"]
    assert measured[["outcome", "nodes", "devices", "block"]].to_numpy().tolist() == [["ok", 2, 2, 0]]
    assert measured["links_error"].isna().all()
    assert {"between nodes"} == set(results.links["tier"]) == set(results.collectives["tier"])
    assert set(results.collectives["operation"]) == {"all_reduce", "all_gather", "reduce_scatter"}


def test_a_client_without_the_token_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before every run at an address; that the error is one line and exit code 2: tests/cli."""
    for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    with pytest.raises(ClusterError, match="the cluster refuses this process's token"):
        check_reachable(address)


LOOK = """
import json, sys, ray
from ray._private.state import actors
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
free, all_of_it = (what.get("CPU") for what in (ray.available_resources(), ray.cluster_resources()))
living = sorted(actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD")
groups = sorted({group["state"] for group in placement_group_table().values()})
seen = sorted({actor["ActorClassName"] for actor in actors().values()})
print(json.dumps({"free": free == all_of_it, "living": living, "placement groups": groups, "seen": seen}))
"""


def test_nothing_of_a_run_is_left_on_the_cluster(results: Results, address: str, environment: dict[str, str]) -> None:
    look = [sys.executable, "-c", LOOK, address]
    done = subprocess.run(look, env=environment, check=True, capture_output=True, text=True, timeout=60)
    seen = json.loads(done.stdout.splitlines()[-1])
    ever = set(seen.pop("seen"))
    assert {"RayTrainWorker", "TrainController", "NodeAgent"} <= ever
    assert not {"DatasetManager", "PlacementGroupCleaner"} & ever  # which harness.launch.ray.launcher leaves out
    assert set(seen.pop("living")) <= {"_AutoscalingCoordinatorActor"}  # Ray Train's own, one a cluster
    assert seen == {"free": True, "placement groups": ["REMOVED"]}
    pids = {rank["pid"] for group in results.environment["groups"] for rank in group["ranks"]}
    assert pids and not [pid for pid in pids if psutil.pid_exists(pid)]


BROKEN = """
import os, sys
if os.environ.get("A_NODE_WITHOUT_IT"):
    import a_package_that_is_not_there
from ray_workload import ConfiguredFault
"""


def test_a_node_that_lacks_the_workload_is_named(address: str, environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(HERE / "ray_workload.py", tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "two.yaml").write_text(EXPERIMENT.replace("ray_workload:ConfiguredFault", "broken:ConfiguredFault"))
    done = ended(*COMMAND, "two.yaml", "--address", address, cwd=tmp_path, code=2, variables=environment, timeout=400)
    message = " ".join((done.stdout + done.stderr).split())
    assert f"broken on {socket.gethostname()} ({OTHER}): ModuleNotFoundError" in message
    assert "a_package_that_is_not_there" in message and f"({HEAD})" not in message and "Traceback" not in message


HOG = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
node = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == sys.argv[2])
@ray.remote(num_cpus=1)
class Hog:
    def ready(self): return True
hog = Hog.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
ray.get(hog.ready.remote())
print("taken", flush=True)
time.sleep(600)
"""
SHRINKS = """
name: shrinks
workload: faulty_workload:Faulty
workload_options: {{folder: {marks}}}
grid: {{strategy: ddp, devices: 2, nodes: 2, workload.fault: [none, node], per_device_batch_size: 8}}
throughput: {{blocks: 1, warmup_steps: 3, windows: 1, window_steps: 4, window_seconds: 0, twin: false, explain: false}}
optimizer: {{name: SGD, lr: 0.01}}
equivalence: false
preflight: false
seed: {seed}
limits: {{trial: 20, attempts: 3}}
"""
SEED = 5
"""Puts the group on two nodes first, and in it the healthy trial."""
WAIT_S = 15.0


def test_a_cluster_that_is_taken_and_then_shrinks(  # the last test here that uses the second node: it kills it
    address: str, environment: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(HERE / "faulty_workload.py", tmp_path)
    (tmp_path / "marks").mkdir()
    (tmp_path / "shrinks.yaml").write_text(SHRINKS.format(marks=tmp_path / "marks", seed=SEED))
    result = {**environment, "PYTHONPATH": str(HERE.parent), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(WAIT_S)}
    pipe, taking = subprocess.PIPE, [sys.executable, "-c", HOG, address, OTHER]
    hog = subprocess.Popen(taking, env=environment, stdout=pipe, text=True)
    assert hog.stdout and hog.stdout.readline() == "taken\n"
    command = [*RUN, "shrinks.yaml", "--address", address, "--output", "out"]
    run = subprocess.Popen(command, env=result, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: _lines(tmp_path), 180)
    finally:
        hog.kill()
        hog.communicate()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 1, output
    lines = _lines(tmp_path)
    healthy, faulty = (
        [line for line in lines if line["nodes"] == 2 and f'"workload.fault": "{name}"' in line["options"]]
        for name in ("none", "node")
    )
    assert [line["outcome"] for line in healthy] == ["lost", "ok"]
    assert [line["outcome"] for line in faulty] == ["lost"] * 3
    waited, died, shrunk = (line["reason"] for line in faulty)
    assert waited == healthy[0]["reason"] and "the worker group did not start" in waited
    rank = faulty[1]["error_rank"]
    assert died == f"the process of rank {rank} terminated unexpectedly"
    assert shrunk == "the cluster shrank: 1 of the 2 nodes that the trial needs are left"
    assert {line["outcome"] for line in lines if line["nodes"] == 1} == {"ok"}
    groups = harness.load(next((tmp_path / "out/shrinks").iterdir())).environment["groups"]
    ranks = [row for group in groups if len(group["ranks"]) == 2 for row in group["ranks"]]
    assert {row["address"] for row in ranks if row["rank"] == rank} == {OTHER}


ON_TWO = """
name: starting
workload: emulated_compute
grid: {strategy: ddp, devices: 2, nodes: 2, per_device_batch_size: 8}
throughput: {blocks: 1, twin: false, traces: false, explain: false}
equivalence: false
"""
STARTING = """
import sys, time, psutil
from dataclasses import replace
from pathlib import Path
from harness.config.load import load_experiment
from harness.launch.ray import launcher
from harness.launch.ray.cluster import connect
from harness.plan.planner import make_plan

def start(fit):
    raylets = [each for each in psutil.process_iter() if each.name() == "raylet"]
    raylet = next(each for each in raylets if f"node_ip_address={sys.argv[2]}" in " ".join(each.cmdline()))
    for process in (raylet, *raylet.children(recursive=True)):
        process.kill()
    global began
    began = time.monotonic()
    return in_thread(fit)

in_thread, launcher.in_thread = launcher.in_thread, start
with connect(sys.argv[1], {}) as cluster:
    two = [node for node in cluster.inventory.nodes if node.address in (sys.argv[2], sys.argv[1].split(":")[0])]
    cluster = replace(cluster, inventory=replace(cluster.inventory, nodes=tuple(two)))
    plan = make_plan(load_experiment(Path("starting.yaml")), cluster.inventory)
    (group,) = [group for group in plan.groups if group.placement.nodes == 2]
    runs = launcher.RayLauncher(cluster, plan.experiment, plan.machine)
    for row in runs.launch(group, deadline=None):
        print("row", round(time.monotonic() - began), row.outcome, row.reason, flush=True)
    for row in runs.launch(group, deadline=None):  # the retry
        print("row", 0, row.outcome, row.reason, flush=True)
    runs.close()
"""
THIRD = "127.0.0.6"
NOTICED_S = 60.0
"""Well below the limit of a start on two nodes, 125 s; Ray itself notices after about 15 s."""


def test_a_node_that_dies_while_a_group_starts_costs_no_start_limit(
    address: str, environment: dict[str, str], tmp_path: Path
) -> None:
    start_node(f"--address={address}", f"--node-ip-address={THIRD}", "--num-cpus=1", variables=environment)
    (tmp_path / "starting.yaml").write_text(ON_TWO)
    done = ended(sys.executable, "-c", STARTING, address, THIRD, cwd=tmp_path, variables=environment, timeout=200)
    rows = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("row ")]
    assert [*dict.fromkeys(reason for _, reason in rows)] == [  # Ray prints lines of its own
        f"lost node {socket.gethostname()} ({THIRD}) was lost while the worker group started",
        "lost the cluster shrank: 1 of the 2 nodes that the trial needs are left",
    ]
    assert max(float(seconds) for seconds, _ in rows) < NOTICED_S, done.stdout


def _lines(home: Path) -> list[dict[str, Any]]:
    files = list(home.glob("out/*/*/trials.jsonl"))
    return [json.loads(line) for line in files[0].read_text().split("\n")[:-1]] if files else []  # whole lines
