"""Who can reach a Ray of our own while it works, and what is left of it afterwards."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.config.load import parse_experiment
from harness.launch.protocol import GroupStarted
from harness.launch.ray import cluster
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from tests.conftest import FEW_STEPS
from tests.listening import command_of, listened_on, outside, started_since

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
GRID = {"model": "resnet8", "strategy": "ddp", "devices": 2, "per_device_batch_size": 8}
CLIENT = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); ray.get(ray.put(1))"


# --- while it works


@dataclass
class Lived:
    """What was seen of one worker group on a Ray of our own, and of both afterwards."""

    results: list[TrialResult]
    reachable: dict[str, list[str]]
    """Processes that other machines could reach while the ranks were connected, and where."""
    addresses: set[str]
    pages: set[str]
    """Those of them on which a page was to be had: Ray starts its dashboard's process even where that is off."""
    commands: list[str]
    clients: dict[str, tuple[int, str]]
    """Exit code and output of processes, by the token that they had."""
    actors: set[str]
    placement_groups: set[str]
    free: tuple[Any, Any]
    processes: list[psutil.Process]
    parts: list[str]
    """Of the group's start."""


@pytest.fixture(scope="module")
def lived() -> Lived:
    """One worker group of two ranks, watched at each of its messages."""
    return live()


def live() -> Lived:
    """Run a worker group on a Ray of our own; return what was seen of it. Imports ray only when its Ray is up."""
    timed = {**FEW_STEPS, "window_seconds": 2.0}  # long enough to look at them
    sections = {"throughput": timed, "equivalence": False, "preflight": False}
    experiment = parse_experiment({"name": "small", "grid": GRID, **sections}, source="small")
    before, reachable, commands = started_since(), dict[str, list[str]](), list[str]()
    addresses, pages, results, parts = set[str](), set[str](), list[TrialResult](), list[str]()
    with cluster.start_embedded(cluster.local_inventory()) as ready:
        import ray
        from ray._private.state import actors  # the public way asks the dashboard, which is off
        from ray.util import placement_group_table

        from harness.launch.ray.launcher import RayLauncher

        plan = make_plan(experiment, ready.inventory)
        group = plan.groups[0].keeping(lambda trial: trial.cell.devices == 2)
        launcher = RayLauncher(ready, experiment, plan.machine)
        for message in launcher.launch(group, deadline=None):
            if not isinstance(message, GroupStarted | TrialResult):
                continue
            results += [message] if isinstance(message, TrialResult) else []
            parts += message.parts if isinstance(message, GroupStarted) else []
            seen = [psutil.Process(), *started_since(before)]
            reachable |= outside(seen)
            addresses = addresses.union(*map(listened_on, seen))
            pages = pages.union(*(listened_on(one) for one in seen if "dashboard.py" in command_of(one)))
            commands = max(commands, list(map(command_of, seen)), key=workers_in)
        clients = ended_as(ray.get_runtime_context().gcs_address)
        launcher.close()
        lived = Lived(
            results,
            reachable,
            addresses,
            pages,
            commands,
            clients,
            {f"{actor['ActorClassName']} {actor['State']}" for actor in actors().values()},
            {entry["state"] for entry in placement_group_table().values()},
            (ray.cluster_resources().get("CPU"), ray.available_resources().get("CPU")),
            started_since(before),
            parts,
        )
    return lived


def workers_in(commands: list[str]) -> int:
    return sum("RayTrainWorker" in command for command in commands)


def ended_as(address: str) -> dict[str, tuple[int, str]]:
    """How clients of a Ray end that have its token, another, and none."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    bare["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # else Ray asks for half a minute
    own = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    with_tokens = {
        "its own": {**bare, **own},
        "another": {**bare, **own, "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        "none": {**bare, "RAY_AUTH_MODE": "disabled"},
    }
    command, pipes = [sys.executable, "-c", CLIENT, address], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = {name: subprocess.Popen(command, env=env, text=True, **pipes) for name, env in with_tokens.items()}
    return {name: ended(process) for name, process in started.items()}


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:  # the client still retries
        process.kill()
        output, _ = process.communicate()
    return process.returncode, output


def test_no_process_listens_beyond_loopback_while_ranks_are_connected(lived: Lived) -> None:
    assert [result.outcome for result in lived.results] == ["ok"]
    assert any("raylet" in command for command in lived.commands)
    assert workers_in(lived.commands) == 2
    assert lived.addresses
    assert not lived.reachable
    assert not lived.pages, "there is no dashboard"


def test_connections_without_the_token_are_refused(lived: Lived) -> None:
    check_refused(lived.clients)


def check_refused(clients: dict[str, tuple[int, str]]) -> None:
    """Check that a client with the token connected, and one with another or none did not."""
    code, output = clients["its own"]
    assert code == 0, output
    for name in ("another", "none"):
        code, output = clients[name]
        assert code != 0 and "Authentication token is missing or incorrect" in output


def test_a_worker_group_leaves_no_actor_no_reservation_and_no_process(lived: Lived) -> None:
    living = {actor for actor in lived.actors if not actor.endswith(" DEAD")}
    serving = {"NodeAgent ALIVE", "Mailbox ALIVE"}  # they are for the whole run
    assert living <= {*serving, "_AutoscalingCoordinatorActor ALIVE"}  # Ray Train's own, one a cluster
    assert lived.placement_groups == {"REMOVED"}
    assert lived.free[0] == lived.free[1]
    assert lived.processes
    _, alive = psutil.wait_procs(lived.processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# --- without the private names of Ray


WITHOUT_PRIVATE_NAMES = """
import json, sys
from pathlib import Path
from harness.launch.ray import private

private.find = lambda module, name: None
private.TEMPORARY_FOLDER = private.CALLBACKS = "_absent"
from tests.launch.test_ray_safety import live, workers_in

lived = live()
facts = {
    "results": [f"{result.outcome} {result.reason}" for result in lived.results],
    "reachable": lived.reachable,
    "addresses": sorted(lived.addresses),
    "workers": workers_in(lived.commands),
    "clients": lived.clients,
    "parts": lived.parts,
}
Path(sys.argv[1]).write_text(json.dumps(facts))
"""


def test_without_ray_s_private_names_a_trial_is_equally_protected(tmp_path: Path) -> None:
    facts_file = tmp_path / "facts.json"
    command = [sys.executable, "-c", WITHOUT_PRIVATE_NAMES, str(facts_file)]
    subprocess.run(command, check=True, timeout=300, cwd=TESTS.parent)
    facts = json.loads(facts_file.read_text())
    assert facts["results"] == ["ok "]
    assert facts["workers"] == 2
    assert facts["addresses"] and not facts["reachable"]
    check_refused(facts["clients"])
    assert facts["parts"] and "resources" not in facts["parts"]  # the detail that the fallback costs
