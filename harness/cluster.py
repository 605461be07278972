"""The Ray cluster: embedded and closed to the outside, or the one at an address. Where Ray is started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import harness
from harness.code_files import python_files
from harness.errors import ClusterError
from harness.guard import guarded
from harness.inventory import Inventory, Node
from harness.mailbox import Mailbox
from harness.node import NodeAgent, describe_node
from harness.scratch import Scratch

CONNECT_TIMEOUT_S, KNOCK_TIMEOUT_S = 25, 5
TRIES = "5"
"""How often a process that asks whether a cluster answers asks it, a second between."""
LOCAL_ADDRESS = "127.0.0.1"
LONGEST_PARENT = 16
"""Of Ray's folder: a socket's name has 107 characters, of which 25 go to our folder and 66 to Ray's names in it."""

_QUIET = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
"""The polling interval is the shortest that leaves windows alone; the rest saves a process or a line.

The last but one keeps Ray from printing what became of its processes: that is in the trial's row. The last one keeps
its SIGTERM handler, which is in force while it starts, from waiting half a minute."""


@dataclass(frozen=True)
class Cluster:
    """A connected cluster: one agent a node, and the mailbox on the driver's node."""

    inventory: Inventory
    mailbox: Any
    agents: Mapping[str, Any]
    embedded: bool

    def missing_paths(self, paths: Iterable[str]) -> dict[str, list[str]]:
        """Which of these paths each node lacks, by host."""
        import ray

        wanted, nodes = list(paths), self.inventory.nodes
        answers = ray.get([self.agents[node.node_id].missing.remote(wanted) for node in nodes], timeout=60)
        named = [f"{node.host} ({node.address})" for node in nodes]
        return {name: missing for name, missing in zip(named, answers, strict=True) if missing}


def local_inventory() -> Inventory:
    """This machine, without starting Ray."""
    return Inventory((describe_node("local", LOCAL_ADDRESS),))


@contextlib.contextmanager
def embedded(inventory: Inventory) -> Iterator[Cluster]:
    """A Ray of our own on this machine: loopback only, token authentication, no dashboard, no statistics.

    That holds whatever the environment says, which may be meant for another cluster; the rest that the user has set
    stays as it is. Ray's own session folder goes with the session.
    """
    closed = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux this binds every port to the loopback interface
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    node = inventory.nodes[0]
    ours = {"address": "local", "include_dashboard": False, "num_cpus": node.cores, "num_gpus": node.gpus}
    with (
        _as_ray_reads(_QUIET, closed),
        Scratch(_sessions()) as folder,
        guarded(folder),
        _session(**ours, _temp_dir=str(folder)),
    ):
        cluster = _connected(inventory, is_embedded=True)
        address = cluster.inventory.nodes[0].address
        if address != LOCAL_ADDRESS:
            raise ClusterError(
                f"the embedded Ray would listen on {address}, where other machines can reach it, and not on "
                f"{LOCAL_ADDRESS} alone: nothing was run. Start a cluster yourself and give its --address"
            )
        yield cluster


@contextlib.contextmanager
def _as_ray_reads(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """The variables inside, and Ray with them.

    Ray reads how open it is when it is imported, and a token once; either may have been for another cluster.
    """
    try:
        with _variables(defaults, fixed):
            _read_again()
            yield
    finally:
        _read_again()


def _read_again() -> None:
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    on_linux = sys.platform.startswith("linux")  # elsewhere Ray keeps to the loopback interface of itself
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, on_linux)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _sessions() -> Path:
    """Where Ray's session folder can be: its sockets have long names below it."""
    wanted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    return wanted if len(str(wanted)) <= LONGEST_PARENT else Path("/tmp")


@contextlib.contextmanager
def connected(address: str, import_path: Path | None) -> Iterator[Cluster]:
    """The cluster at an address; raises ClusterError where nobody answers.

    Ships this package, and the folder of a user's own workload, to its workers.
    """
    with _as_ray_reads(_QUIET), Scratch() as code:
        _check_reachable(address)
        copy_code(Path(harness.__file__).parent, code / "harness")
        if import_path:
            copy_code(import_path, code)
        with _session(address=address, runtime_env={"working_dir": str(code)}):
            cluster = _connected(None, is_embedded=False)
            for agent in cluster.agents.values():
                agent.sweep.remote()  # nobody waits for it
            yield cluster


@contextlib.contextmanager
def _variables(defaults: Mapping[str, str], fixed: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Sets what the environment does not set itself, and what is fixed in any case; takes it back afterwards."""
    wanted = {**{name: value for name, value in defaults.items() if name not in os.environ}, **fixed}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def copy_code(folder: Path, target: Path) -> None:
    """Copies the Python files below a folder: data and results beside them may be large and stay behind."""
    for file in python_files(folder):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


@contextlib.contextmanager
def _session(**arguments: Any) -> Iterator[None]:
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=True, **arguments)
    except Exception as error:  # where it does not come up in time, Ray raises no narrower one
        raise ClusterError(f"Ray did not start: {type(error).__name__}: {error}") from error
    except SystemExit:  # what Ray makes of a SIGTERM until ours is back
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread, or not set from Python
                signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _connected(inventory: Inventory | None, *, is_embedded: bool) -> Cluster:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    agent_class: Any = ray.remote(num_cpus=0)(NodeAgent)
    mailbox_class: Any = ray.remote(num_cpus=0)(Mailbox)

    def on(node_id: str) -> Any:
        return NodeAffinitySchedulingStrategy(node_id, soft=False)

    agents = {node["NodeID"]: agent_class.options(scheduling_strategy=on(node["NodeID"])).remote() for node in alive}
    mailbox = mailbox_class.options(scheduling_strategy=on(here)).remote()
    if inventory is None:
        described = ray.get(
            [agents[node["NodeID"]].describe.remote(node["NodeID"], node["NodeManagerAddress"]) for node in alive],
            timeout=120,
        )
        shares = [_ray_share(node, raw["Resources"]) for node, raw in zip(described, alive, strict=True)]
        inventory = Inventory(tuple(node for node in shares if node.cores or node.gpus), attached=True)
    else:
        only = inventory.nodes[0]
        inventory = Inventory((Node(**{**vars(only), "node_id": here, "address": alive[0]["NodeManagerAddress"]}),))
    return Cluster(inventory, mailbox, agents, is_embedded)


def _ray_share(node: Node, resources: Mapping[str, float]) -> Node:
    """A node as far as Ray may use it: physical cores, and no more than ``ray start`` was told to offer."""
    return Node(
        **{
            **vars(node),
            "cores": min(node.cores, int(resources.get("CPU", 0))),
            "gpus": int(resources.get("GPU", 0)),
            "gpu_model": node.gpu_model if resources.get("GPU") else None,
        }
    )


def _check_reachable(address: str) -> None:
    """Asks in a process of its own, which can be stopped: Ray itself may wait for minutes or end the process."""
    if address.startswith("ray://"):
        raise ClusterError(f"--address {address}: Ray Client is not supported; give the head's HOST:PORT (GCS)")
    _knock(address)
    script = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, address],
            env={"RAY_NUM_REDIS_GET_RETRIES": TRIES, **os.environ},
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(_nobody(address, f"no answer within {CONNECT_TIMEOUT_S} s")) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ClusterError(_nobody(address, lines[-1][:300] if lines else f"exit code {done.returncode}"))


def _knock(address: str) -> None:
    """Whether something listens at HOST:PORT; Ray would try for half a minute. Other forms are for Ray to read."""
    host, colon, port = address.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_TIMEOUT_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ClusterError(_nobody(address, str(error))) from None


def _nobody(address: str, reason: str) -> str:
    return (
        f"--address {address}: no Ray cluster answers there ({reason}). Start one with 'ray start --head', "
        "give its HOST:PORT and its RAY_AUTH_TOKEN, or leave --address out to use this machine"
    )
