"""The whole pipeline on a real cluster of two Ray nodes, 127.0.0.2 and 127.0.0.3, on this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import harness

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
EXPERIMENT = """
name: two
workload: ray_workload:Told
grid: {strategy: [single, dp, ddp], devices: [1, 2], nodes: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 1, warmup_steps: 2, windows: 1, window_steps: 4, window_seconds: 0}
convergence: {epochs: 1, seeds: [0], only: {strategy: ddp, nodes: 2}}
optimizer: {name: SGD, lr: 0.01}
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **token}


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """A head and a second node, one CPU each."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    with socket.socket() as free:
        free.bind((HEAD, 0))
        address = f"{HEAD}:{free.getsockname()[1]}"
    port = address.split(":")[1]
    head = ["start", "--head", f"--node-ip-address={HEAD}", f"--port={port}", "--num-cpus=1"]
    other = ["start", f"--address={address}", f"--node-ip-address={OTHER}", "--num-cpus=1"]
    quiet = {"env": environment, "check": True, "capture_output": True, "timeout": 120}
    subprocess.run([*ray, *head, "--include-dashboard=false", "--disable-usage-stats"], **quiet)  # type: ignore[call-overload]
    try:
        subprocess.run([*ray, *other], **quiet)  # type: ignore[call-overload]
        yield address
    finally:
        subprocess.run([*ray, "stop", "--force"], env=environment, check=False, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def results(
    address: str, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> harness.results.Results:  # type: ignore[name-defined]
    home = tmp_path_factory.mktemp("two")
    shutil.copy(HERE / "ray_workload.py", home)
    (home / "two.yaml").write_text(EXPERIMENT)
    done = subprocess.run(
        [sys.executable, "-m", "harness.run", "two.yaml", "--address", address, "--output", "out"],
        env={**environment, "PYTHONPATH": str(HERE.parent)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return harness.load(next((home / "out" / "two").iterdir()))


def test_ddp_spans_both_nodes_with_the_right_ranks(results: harness.results.Results) -> None:  # type: ignore[name-defined]
    ddp = results.trials[(results.trials["strategy"] == "ddp") & (results.trials["nodes"] == 2)]
    ddp = ddp[(ddp["devices"] == 2) & (ddp["outcome"] == "ok")]
    assert sorted(ddp["kind"]) == ["convergence", "diagnostic", "throughput"]
    ranks = results.ranks[results.ranks["trial_id"].isin(ddp["trial_id"])].sort_values(["trial_id", "rank"])
    assert ranks[["rank", "local_rank", "node_rank"]].to_numpy().tolist() == [[0, 0, 0], [1, 0, 1]] * 3
    for _, trial in ranks.groupby("trial_id"):
        assert set(trial["address"]) == {HEAD, OTHER}
        assert trial["node_id"].nunique() == 2


def test_ddp_over_both_nodes_trains_as_one_device_does(results: harness.results.Results) -> None:  # type: ignore[name-defined]
    checked = results.agreement[results.agreement["nodes"] == 2]
    assert checked["strategy"].tolist() == ["ddp"]
    assert checked["agrees"].all(), checked["reason"].tolist()


def test_dp_is_skipped_across_nodes(results: harness.results.Results) -> None:  # type: ignore[name-defined]
    dp = results.trials[(results.trials["strategy"] == "dp") & (results.trials["nodes"] == 2)]
    assert set(dp["outcome"]) == {"skipped"}
    assert set(dp["reason"]) == {"dp drives its devices from one process and cannot span nodes"}


def test_both_nodes_and_their_interface_are_in_the_environment(results: harness.results.Results) -> None:  # type: ignore[name-defined]
    spanning = [group for group in results.environment["groups"] if len(group["nodes"]) == 2]
    assert spanning
    assert {node["variables"]["GLOO_SOCKET_IFNAME"] for node in spanning[0]["nodes"]} == {"lo"}


def test_a_client_without_the_token_is_refused(address: str, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(EXPERIMENT.replace("ray_workload:Told", "image_classification"))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-m", "harness.run", str(tmp_path / "two.yaml"), "--address", address],
        env={**clean, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    assert done.returncode == 2
    assert "no Ray cluster answers there" in done.stderr


LOOK = """
import json, sys, ray
from ray._private.state import actors
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
free, all_of_it = (what.get("CPU") for what in (ray.available_resources(), ray.cluster_resources()))
living = sorted(actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD")
groups = sorted({group["state"] for group in placement_group_table().values()})
print(json.dumps({"free": free == all_of_it, "living": living, "placement groups": groups, "seen": len(actors())}))
"""


def test_nothing_of_a_run_is_left_on_the_cluster(
    results: harness.results.Results,  # type: ignore[name-defined]
    address: str,
    environment: dict[str, str],
) -> None:
    look = [sys.executable, "-c", LOOK, address]
    done = subprocess.run(look, env=environment, check=True, capture_output=True, text=True, timeout=60)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("seen") > 4
    assert set(seen.pop("living")) <= {"_AutoscalingCoordinatorActor"}  # Ray Train's own: one a cluster, and it stays
    assert seen == {"free": True, "placement groups": ["REMOVED"]}
    pids = {rank["pid"] for group in results.environment["groups"] for rank in group["ranks"]}
    assert pids and not [pid for pid in pids if psutil.pid_exists(pid)]
