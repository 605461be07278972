"""Arguments and environment of an embedded Ray and of one at an address; no Ray is started here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from harness.errors import ClusterError
from harness.launch import agent
from harness.launch.ray import cluster, nodes
from harness.launch.ray.session import JOB_VARIABLE
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import make_plan
from harness.run import prepare
from harness.system.scratch import PREFIX
from tests.conftest import Make, laptop


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray would have been started with, and what it would have seen in the environment."""
    from ray._private import ray_constants  # imported before anything is set, as in a notebook
    from ray._raylet import AuthenticationTokenLoader, get_authentication_mode

    seen: list[dict[str, Any]] = []

    @contextmanager
    def session(folder: Path | None = None, **arguments: Any) -> Iterator[None]:
        result = {
            "opens": ray_constants.ENABLE_RAY_CLUSTER,
            "mode": get_authentication_mode(),
            "token": AuthenticationTokenLoader.instance().get_raw_token() if "RAY_AUTH_TOKEN" in os.environ else None,
        }
        seen.append({"folder": folder, "arguments": arguments, "environ": dict(os.environ), **result})
        yield

    def connected(inventory: Any, *, is_embedded: bool) -> Any:
        return SimpleNamespace(agents={}, inventory=inventory)

    monkeypatch.setattr(cluster, "session", session)
    monkeypatch.setattr(cluster, "_connected", connected)
    monkeypatch.setattr(cluster, "check_reachable", lambda address: None)
    return seen


TOKEN = 1
"""What Ray calls the mode in which a token is asked for; 0 asks for none."""
THEIRS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "c" * 64}
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_USAGE_STATS_ENABLED": "1"}


@pytest.fixture(params=[{}, THEIRS, OPEN], ids=["nothing", "a token", "all open"])
def environ(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the user has set for Ray."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    given: dict[str, str] = request.param
    return given


def test_an_embedded_ray_is_private_whatever_the_environment(
    environ: dict[str, str], sessions: list[dict[str, Any]]
) -> None:
    before = dict(os.environ)
    with cluster.start_embedded(laptop()):
        folder = sessions[0]["folder"]
        assert folder.is_dir() and folder.name.startswith(PREFIX)
    assert dict(os.environ) == before
    assert not folder.exists()
    ours, seen = sessions[0]["arguments"], sessions[0]["environ"]
    assert not sessions[0]["opens"]
    assert (sessions[0]["mode"], sessions[0]["token"]) == (TOKEN, seen["RAY_AUTH_TOKEN"])
    assert ours["address"] == "local" and ours["include_dashboard"] is False
    assert (seen["RAY_AUTH_MODE"], seen["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("token", "0")
    assert seen["RAY_USAGE_STATS_ENABLED"] == "0"
    assert len(seen["RAY_AUTH_TOKEN"]) == 64 and seen["RAY_AUTH_TOKEN"] not in environ.values()


def test_a_cluster_at_an_address_uses_the_users_authentication(
    environ: dict[str, str], sessions: list[dict[str, Any]]
) -> None:
    before = dict(os.environ)
    with cluster.start_embedded(laptop()):
        own = sessions[0]["environ"]["RAY_AUTH_TOKEN"]
    with cluster.connect("head:6379", {}):
        pass
    assert dict(os.environ) == before
    seen = sessions[1]["environ"]
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        assert seen.get(name) == environ.get(name)
    assert sessions[1]["opens"] == sys.platform.startswith("linux")
    assert sessions[1]["mode"] == (TOKEN if environ.get("RAY_AUTH_MODE") == "token" else 0)
    assert sessions[1]["token"] == environ.get("RAY_AUTH_TOKEN")
    assert own not in str(sessions[1])


@pytest.mark.parametrize(
    ("config", "shipped"),
    [
        (None, True),
        ({"runtime_env": {"env_vars": {"A": "1"}}}, True),
        ({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}, False),
    ],
)
def test_a_job_s_working_directory_is_kept(
    config: object, shipped: bool, sessions: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    if config is not None:
        monkeypatch.setenv(JOB_VARIABLE, json.dumps(config))
    with cluster.connect("head:6379", {"": tmp_path}):
        assert (sessions[0]["arguments"]["runtime_env"] is not None) == shipped


def test_an_unprotected_ray_is_not_used(sessions: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Inventory((Node("n0", "10.0.0.7", "host", 2),))
    monkeypatch.setattr(cluster, "_connected", lambda *_, **__: SimpleNamespace(inventory=outside))
    with (
        pytest.raises(ClusterError, match=r"would listen on 10\.0\.0\.7, .* give its --address"),
        cluster.start_embedded(laptop()),
    ):
        raise AssertionError("it was used")


@pytest.mark.parametrize(
    ("variable", "parent"),
    [(None, "/tmp"), ("/dev/shm", "/dev/shm"), ("/a/folder/with/a/long/name", "/tmp")],
)
def test_rays_sockets_have_names_that_are_short_enough(
    variable: str | None, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    if variable:
        monkeypatch.setenv("RAY_TMPDIR", variable)
    assert cluster._sessions() == Path(parent)
    below = f"/{PREFIX}abcdefgh/session_2026-11-21_18-12-25_123456_1234567/sockets/plasma_store"
    assert max(cluster.LONGEST_PARENT, len(parent)) + len(below) <= 107


def test_an_unresponsive_node_is_named_with_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    monkeypatch.setattr(ray, "get", get)
    traceback = "ray::NodeAgent.describe() (pid=1, ip=10.0.0.2)\n  File x\nModuleNotFoundError: No module named 'torch'"
    assert cluster._answers(["a (10.0.0.1)", "a (10.0.0.1)"], [1, 2]) == [1, 2]  # two raylets of one machine
    with pytest.raises(ClusterError, match=r"^b \(10.0.0.2\): .*ModuleNotFoundError: No module named 'torch'\)"):
        cluster._answers(["a (10.0.0.1)", "b (10.0.0.2)"], [1, ray.exceptions.RayError(traceback)])


@pytest.mark.slow
def test_import_errors_are_reported_with_their_last_line_within_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "breaks.py").write_text("print('no word of this')\nimport nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(agent, "IMPORT_S", 3.0)
    assert agent.NodeAgent().failing_imports(["json", "breaks", "hangs"]) == {
        "breaks": "ModuleNotFoundError: No module named 'nowhere_at_all'",
        "hangs": "it takes more than 3 s",
    }


class Agents:
    """Of ray_watch's questions: a new agent in the place of a dead one may be slow, or die too."""

    def __init__(self) -> None:
        self.agents: dict[str, Any] = {"a": 1, "gone": 2}

    def replace_agents(self, dead: list[str]) -> list[str]:
        assert sorted(dead) == ["a", "gone"]
        return ["a"]


@pytest.mark.parametrize("dead_again", [False, True])
def test_a_slow_agent_is_retried_and_a_dead_one_is_not(monkeypatch: pytest.MonkeyPatch, dead_again: bool) -> None:
    answers = iter([({}, ["a", "gone"]), ({}, ["a"] if dead_again else [])])
    monkeypatch.setattr(nodes, "_answers", lambda *asked: next(answers))
    cluster: Any = Agents()
    assert nodes.ask_agents(cluster, "alive", [("a", 1), ("gone", 2)]) == [None, None]
    assert list(cluster.agents) == ([] if dead_again else ["a"])


def test_answers_return_in_the_order_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answers(cluster: object, question: str, by_node: dict[str, list[int]]) -> tuple[dict[str, Any], list[str]]:
        asked.append(by_node)
        return {"b": [20, 21], "a": [10, 11]}, []  # "silent" gives none

    monkeypatch.setattr(nodes, "_answers", answers)
    things, cluster = [("a", 0), ("b", 0), ("silent", 0), ("a", 1), ("b", 1)], Agents()
    assert nodes.ask_agents(cluster, "alive", things) == [10, 20, None, 11, 21]  # type: ignore[arg-type]
    assert asked == [{"a": [0, 1], "b": [0, 1], "silent": [0]}]


def test_only_nodes_in_use_are_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(*lacks: str) -> Any:
        return SimpleNamespace(missing=SimpleNamespace(remote=lambda paths: [*lacks]))

    three = tuple(Node(name, "10.0.0.1", name, 2) for name in ("n0", "n1", "n2"))
    agents = {"n0": agent(), "n1": agent("/data"), "n2": agent("/data")}
    monkeypatch.setattr(cluster, "_answers", lambda names, references: references)
    ready = cluster.Cluster(Inventory(three), None, agents, embedded=False)
    assert ready.missing_paths(["/data"], [True, True, False]) == {"n1 (10.0.0.1)": ["/data"]}
    assert list(ready.missing_paths(["/data"])) == ["n1 (10.0.0.1)", "n2 (10.0.0.1)"]


def test_a_node_without_the_requested_devices_needs_neither_imports_nor_data(
    make_experiment: Make, tmp_path: Path
) -> None:
    asked: list[Any] = []

    class Answers:
        def failing_imports(self, modules: list[str], used: list[bool], folder: str | None = None) -> dict[str, Any]:
            asked.append(used)
            return {}

        missing_paths = failing_imports

    two = (Node("n0", "10.0.0.1", "n0", 8, gpus=2), Node("n1", "10.0.0.2", "n1", 8))
    experiment = make_experiment({"strategy": "ddp", "devices": 2, "per_device_batch_size": 8}, device="cuda")
    plan = make_plan(experiment, Inventory(two))
    assert plan.trials
    prepare.check_imports(plan, Answers(), tmp_path)  # type: ignore[arg-type]
    prepare.check_paths(plan, Answers())  # type: ignore[arg-type]
    assert asked == [[True, False]] * 2
