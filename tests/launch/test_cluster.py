"""An embedded Ray and one at an address, and the fallbacks for Ray's private names; no Ray is started here."""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
import torch

from harness.config.values import GIB
from harness.errors import ClusterError
from harness.launch import agent
from harness.launch.protocol import Job
from harness.launch.ray import cluster, controller, launcher, nodes, private, session
from harness.launch.ray.cluster import Cluster
from harness.launch.ray.session import JOB_VARIABLE
from harness.launch.supervision import Ending, GroupEnd
from harness.plan.cell import Cell
from harness.plan.inventory import Inventory, Node
from harness.plan.memory_forecast import available
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
    ("config", "shipped"), [("{}", True), ('{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}', False)]
)
def test_a_job_s_working_directory_is_kept(
    config: str, shipped: bool, sessions: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, config)
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
    ("variable", "parent"), [(None, "/tmp"), ("/dev/shm", "/dev/shm"), ("/a/folder/with/a/long/name", "/tmp")]
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
    (tmp_path / "ends.py").write_text("import os\nos.write(2, b'out of luck')\nos._exit(3)\n")
    breaks = {"breaks": "ModuleNotFoundError: No module named 'nowhere_at_all'"}
    failing = agent.NodeAgent().failing_imports
    assert failing(["json", "breaks", "hangs", "ends"], 3.0) == {**breaks, "hangs": "it takes more than 3 s"}
    assert failing(["breaks", "ends", "json"], 60.0) == {**breaks, "ends": "out of luck"}
    assert failing(["json"], 60.0) == {}


FAKE_TORCH = """
from types import SimpleNamespace
SEEN = {seen}
cuda = SimpleNamespace(
    device_count=lambda: len(SEEN),
    get_device_properties=lambda index: SimpleNamespace(name=SEEN[index][0], total_memory=SEEN[index][1]),
)
print("a warning of an import")
"""
WHOLE, SLICE = ("NVIDIA H100 80GB HBM3", 79 * GIB), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9 * GIB)


@pytest.mark.parametrize(
    ("seen", "model", "bytes_of_gpu"),
    [
        ([WHOLE] * 8, WHOLE[0], 79 * GIB),
        ([SLICE], SLICE[0], 9 * GIB),  # nvidia-smi names the whole GPU
        ([WHOLE, ("NVIDIA A10", 22 * GIB)], "NVIDIA A10 + NVIDIA H100 80GB HBM3", 22 * GIB),
        ("no list", "GPU", None),
    ],
)
def test_gpus_have_the_names_and_the_memory_that_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Any, model: str, bytes_of_gpu: int | None
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(seen=seen))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    node = agent.describe_node("n", "127.0.0.1")
    assert (node.gpus, node.gpu_model, node.gpu_memory_bytes) == (len(seen), model, bytes_of_gpu)
    single = Cell("w", None, None, "single", "cuda", 1, 1, "weak", 8, 8)
    assert available(single, Inventory((node,))) == bytes_of_gpu


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 120), (64, 435)])
def test_the_limits_of_a_start_grow_with_the_nodes_that_read_the_same_files(
    nodes: int, seconds: int, monkeypatch: pytest.MonkeyPatch, make_experiment: Make
) -> None:
    waited: list[float] = []

    def get(reference: Any, timeout: float) -> dict[str, str]:
        waited.append(timeout)
        return {}

    monkeypatch.setattr(ray, "get", get)
    limits: list[float] = []
    agent = SimpleNamespace(
        failing_imports=SimpleNamespace(remote=lambda modules, limit_s, *more: limits.append(limit_s))
    )
    many = tuple(Node(f"n{number}", "10.0.0.1", f"n{number}", 2) for number in range(nodes))
    ready = cluster.Cluster(Inventory(many), MagicMock(), {node.node_id: agent for node in many}, embedded=False)
    assert ready.failing_imports(["torch"]) == {}
    assert waited[0] == pytest.approx(seconds, abs=1) and max(limits) == 0.8 * seconds

    started: list[str | None] = []
    monkeypatch.setattr(
        launcher, "in_thread", lambda fit: started.append(os.environ.get(launcher.START_LIMIT)) or 1 / 0
    )
    whole: list[float] = []
    monkeypatch.setattr(launcher, "Watchdog", lambda *given, start_s, **named: whole.append(start_s))
    monkeypatch.setattr(launcher.RayLauncher, "_trainer", lambda *given: SimpleNamespace(fit=None))
    monkeypatch.setattr(launcher.RayLauncher, "choice", SimpleNamespace(nodes_for=lambda group, deadline: many))
    monkeypatch.setattr(launcher, "_answer", lambda reference: None)
    experiment = make_experiment({"strategy": "single", "devices": 1, "per_device_batch_size": 8})
    plan = make_plan(experiment, Inventory(many))
    for given in (None, "7"):  # what the user has set holds
        if given:
            monkeypatch.setenv(launcher.START_LIMIT, given)
        with closing(launcher.RayLauncher(ready, experiment, plan.machine)) as ours, pytest.raises(ZeroDivisionError):
            list(ours.launch(plan.groups[0], deadline=None))
    assert whole == [2 * seconds, 7 + seconds]  # Ray waits for resources, then processes import
    assert started == [str(seconds), "7"] and os.environ[launcher.START_LIMIT] == "7"


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"),
    [
        (range(64), "max", 32),
        (range(32), "max", 16),  # what a scheduler gives: 16 cores of 2 threads each
        (range(0, 64, 2), "max", 32),  # one thread of each core
        (range(64), "800000", 8),
        ([5], "50000", 1),
    ],
)
def test_processors_that_share_a_core_count_once(
    allowed: Sequence[int], quota: str, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent.psutil, "cpu_count", lambda logical=True: 64 if logical else 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed), raising=False)
    for number in range(64):
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number // 2 * 2}-{number // 2 * 2 + 1}\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
    assert agent.usable_cores(tmp_path) == cores


def test_without_a_topology_the_processors_that_are_allowed_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent.psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3}, raising=False)
    assert agent.usable_cores(tmp_path) == 3


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


def test_nodes_that_are_not_used_or_lack_the_devices_are_asked_nothing(
    monkeypatch: pytest.MonkeyPatch, make_experiment: Make, tmp_path: Path
) -> None:
    def agent(*lacks: str) -> Any:
        return SimpleNamespace(missing=SimpleNamespace(remote=lambda paths: [*lacks]))

    three = tuple(Node(name, "10.0.0.1", name, 2) for name in ("n0", "n1", "n2"))
    agents = {"n0": agent(), "n1": agent("/data"), "n2": agent("/data")}
    monkeypatch.setattr(cluster, "_answers", lambda names, references: references)
    ready = cluster.Cluster(Inventory(three), None, agents, embedded=False)
    assert ready.missing_paths(["/data"], [True, True, False]) == {"n1 (10.0.0.1)": ["/data"]}
    assert list(ready.missing_paths(["/data"])) == ["n1 (10.0.0.1)", "n2 (10.0.0.1)"]
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


PACKAGE = Path(private.__file__).parents[2]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray without any of the private names."""
    monkeypatch.setattr(private, "find", lambda module, name: None)
    monkeypatch.setattr(private, "CALLBACKS", "_absent")


def test_private_names_stand_in_one_module() -> None:
    private_name = re.compile(r"(?<![.\w])ray\.[\w.]*\b_[a-z]|from ray\b.* import .*\b_[a-z]|_create_default_callbacks")
    users = {path.name for path in PACKAGE.rglob("*.py") if private_name.search(path.read_text())}
    assert users == {"private.py"}


def test_the_installed_ray_has_the_names() -> None:
    for module, name in (
        ("ray._private.ray_constants", "ENABLE_RAY_CLUSTER"),
        ("ray._private.ray_constants", "env_bool"),
        ("ray._raylet", "Config"),
        ("ray._raylet", "AuthenticationTokenLoader"),
        ("ray._private.auto_init_hook", "enable_auto_connect"),
        ("ray.train.v2._internal.execution.callback", "WorkerGroupCallback"),
        ("ray.train.torch", "TorchTrainer"),
        ("ray._private.state", "state"),
        ("ray._private.state", "actors"),
        ("ray._private.worker", "global_worker"),
        ("ray._raylet", "GcsClient"),
        ("ray.core.generated.autoscaler_pb2", "GetClusterStatusReply"),
        (
            "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
            "get_or_create_autoscaling_coordinator",
        ),
        ("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy"),
    ):
        assert private.find(module, name) is not None, name
        assert private.find(module, "NO_SUCH_NAME") is None and private.find("ray._private.no_such", name) is None


@pytest.mark.parametrize(
    "gone", [None, "enable_auto_connect", "Config", "AuthenticationTokenLoader", "ENABLE_RAY_CLUSTER", "env_bool"]
)
@pytest.mark.parametrize("fixed", [{"RAY_AUTH_MODE": "token"}, {}])
def test_ray_without_certain_protection_is_not_started(
    gone: str | None, fixed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All names are gone (None), or one of them."""
    find, before = private.find, dict(os.environ)
    monkeypatch.setattr(private, "find", lambda module, name: None if gone in (None, name) else find(module, name))
    refused = r"was imported before its authentication token .* nothing was started"
    with pytest.raises(ClusterError, match=refused), session.as_ray_reads({}, fixed):
        raise AssertionError("it was used")
    assert dict(os.environ) == before


def test_without_protection_neither_an_embedded_nor_an_external_cluster_is_used(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr(cluster, "check_reachable", lambda address: pytest.fail("a cluster was asked"))
    with pytest.raises(ClusterError, match="nothing was started"), cluster.start_embedded(laptop()):
        raise AssertionError("it was used")
    with pytest.raises(ClusterError, match="nothing was started"), cluster.connect("head:6379", {}):
        raise AssertionError("it was used")


def test_ray_imported_after_the_variables_are_set_is_protected(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray")
    imported: list[dict[str, str]] = []

    class Importer:
        """Imports ray: an object, with what the environment was then."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "ray":
                imported.append(dict(os.environ))
                sys.modules["ray"] = ray
                raise ImportError("as far as this test needs it")

    monkeypatch.setattr(sys, "meta_path", [Importer, *sys.meta_path])
    with pytest.raises(ImportError, match="as far as"), session.as_ray_reads({}, {"RAY_AUTH_TOKEN": "ours"}):
        raise AssertionError
    assert imported[0]["RAY_AUTH_TOKEN"] == "ours" and imported[0]["RAY_ENABLE_AUTO_CONNECT"] == "0"


def test_without_the_private_argument_the_session_folder_is_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[dict[str, Any], str | None]] = []

    def init(**arguments: Any) -> None:
        calls.append((arguments, os.environ.get("RAY_TMPDIR")))
        if "_temp_dir" in arguments:
            raise RuntimeError("Unknown keyword argument(s): _temp_dir")

    def failing(**arguments: Any) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(ray, "init", failing)
    with pytest.raises(RuntimeError, match="no space left"):  # no missing name
        private.init(tmp_path)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    private.init(tmp_path, num_cpus=2)
    assert calls == [({"num_cpus": 2, "_temp_dir": str(tmp_path)}, None), ({"num_cpus": 2}, str(tmp_path))]
    private.init(None, address="head:6379")
    assert calls[2:] == [({"address": "head:6379"}, None)]


def test_processes_are_killed_at_once_or_as_ray_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    node = SimpleNamespace(kill_all_processes=lambda **named: calls.append(named))
    found: list[Any] = [node]
    monkeypatch.setattr(private, "find", lambda module, name: found[0])
    monkeypatch.setattr(ray, "shutdown", lambda: node.kill_all_processes(check_alive=False, allow_graceful=True))
    private.shut_down()
    assert calls == [{"check_alive": False, "allow_graceful": False}]

    def with_other_parameters(allow_graceful: bool = False, wait: int = 0) -> None:
        calls.append({"wait": wait})

    node.kill_all_processes = with_other_parameters
    monkeypatch.setattr(ray, "shutdown", lambda: node.kill_all_processes(wait=3))
    private.shut_down()
    found[0] = None  # a Ray without the name of its node
    private.shut_down()
    assert calls[1:] == [{"wait": 3}] * 2


def test_without_ray_s_callback_class_the_start_has_one_part_less(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(controller.startup_callbacks("mailbox", 0)) == 1
    assert private.worker_group_callback() is object
    monkeypatch.setattr(controller, "WorkerGroupCallback", object)
    assert controller.startup_callbacks("mailbox", 0) == []


@pytest.mark.parametrize(("name", "left"), [(private.CALLBACKS, [1]), ("_absent", [1, "two"])])
def test_callbacks_are_dropped_by_name_or_stay(name: str, left: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def _create_default_callbacks(self) -> list[Any]:
            return [1, "two"]

    monkeypatch.setattr(private, "CALLBACKS", name)
    trainer = Trainer()
    private.drop_callbacks(trainer, ("str",))
    assert trainer._create_default_callbacks() == left


def test_ranks_that_never_registered_under_ray_cost_each_trial_a_row(make_experiment: Make) -> None:
    (group, *_) = make_plan(make_experiment({"per_device_batch_size": 8}, throughput={"blocks": 1}), laptop()).groups
    end = GroupEnd(Ending.NEVER_STARTED, (), (), None)
    watchdog: Any = SimpleNamespace(connected=False, dead_ranks=None)
    rows = [*launcher._failed_trials(group, end, None, watchdog)]
    assert [row.trial_id for row in rows] == [trial.id for trial in group.trials]
    assert {row.reason for row in rows} == {
        "the worker processes did not start: none registered with the driver in time"
    }


def test_a_node_is_dead_by_the_table_of_the_cluster_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Node(f"n{number}", f"10.0.0.{number}", "host", 2) for number in (1, 2)]
    table = [{"NodeID": "n1", "Alive": True}, {"NodeID": "n2", "Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: table)
    assert nodes.dead_node(two) == "host (10.0.0.2)" and nodes.dead_node(two[:1]) is None
    del table[1]  # Ray keeps a limited number of dead nodes
    assert nodes.dead_node(two) == "host (10.0.0.2)"
    monkeypatch.setattr(nodes, "ANSWER_S", 0.05)
    for gone in (lambda: 1 / 0, lambda: sys.exit(1), lambda: time.sleep(1)):
        monkeypatch.setattr(ray, "nodes", gone)
        assert nodes.dead_node(two) is None, "the mailbox tells whether the whole cluster is lost"


def test_a_node_that_dies_during_a_start_costs_each_trial_a_row_that_is_retried(make_experiment: Make) -> None:
    (group, *_) = make_plan(make_experiment({"per_device_batch_size": 8}, throughput={"blocks": 1}), laptop()).groups
    end = GroupEnd(Ending.NODE_LOST, (), (), None)
    watchdog: Any = SimpleNamespace(connected=False, dead_ranks=None, dead_node="h (10.0.0.2)")
    rows = [*launcher._failed_trials(group, end, RuntimeError("its controller was killed"), watchdog)]
    assert [row.trial_id for row in rows] == [trial.id for trial in group.trials]
    assert {(row.outcome, row.reason) for row in rows} == {
        ("lost", "node h (10.0.0.2) was lost while the worker group started")
    }


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_several_nodes_exchange_through_the_store_of_rank_0(
    nodes: int, make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Inventory(tuple(Node(f"n{number}", f"10.0.0.{number}", f"n{number}", 2) for number in (1, 2)))
    plan = make_plan(
        make_experiment({"strategy": "ddp", "devices": 2, "nodes": nodes, "per_device_batch_size": 8}), two
    )
    group = next(group for group in plan.groups if group.placement.workers == 2 and group.placement.nodes == nodes)
    place = SimpleNamespace(get_local_rank=lambda: 0, get_world_size=lambda: 2, get_node_rank=lambda: 1)
    monkeypatch.setattr(launcher, "get_context", lambda: place)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    ranks = launcher._ranks(Job(plan.experiment, group, 1), SimpleNamespace(rank=1, node_id="n1"))  # type: ignore[arg-type]
    assert (ranks.exchange is not None) is (nodes == 2)
    if ranks.exchange:
        ranks.gather_to_first("of rank 1")
        assert pickle.loads(server.get("exchange/1/1")) == "of rank 1"


@pytest.mark.parametrize(
    ("embedded", "request_of_run", "left_out"), [(True, None, True), (False, None, False), (False, object(), True)]
)
def test_a_trainer_requests_nodes_only_on_a_cluster_for_which_the_run_requests_none(
    embedded: bool, request_of_run: object, left_out: bool, make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(make_experiment({"strategy": "single", "per_device_batch_size": 8}), laptop())
    known = Cluster(plan.inventory, MagicMock(), {}, embedded=embedded, request=request_of_run)  # type: ignore[arg-type]
    monkeypatch.setattr(launcher, "TorchTrainer", lambda *given, **named: SimpleNamespace())
    seen: list[object] = []
    monkeypatch.setattr(private, "leave_out_requests", seen.append)
    launcher.RayLauncher(known, plan.experiment, plan.machine)._trainer(plan.groups[0], plan.inventory.nodes, 0)
    assert bool(seen) is left_out
