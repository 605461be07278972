"""The Ray cluster: an embedded one, open to this machine alone, or the one at an address."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ClusterError
from harness.launch.agent import NodeAgent, describe_node
from harness.launch.mailbox import Mailbox
from harness.launch.ray import private
from harness.launch.ray.reaper import end_holders, reaper_for
from harness.launch.ray.session import as_ray_reads, check_reachable, has_working_dir, session
from harness.launch.startup import IMPORT_PART, start_limit_s
from harness.plan.inventory import Inventory, Node
from harness.plan.rows import Json
from harness.system.files import PACKAGE_FOLDER, python_files
from harness.system.scratch import Scratch
from harness.system.user_code import CodeVersion

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RENEW_S = 20.0
"""The time between two renewals, the same as Ray Train's."""
EXPIRE_S = 90.0
"""The time after its last renewal at which a request expires; Ray looks for expired ones every 20 s."""
ANSWER_S = 15.0
"""Timeout of the actor that holds the requests."""
LOCAL_ADDRESS = "127.0.0.1"
MAILBOX_THREADS = 16
"""The driver and a rank that announces a trial may wait in a call, each in a thread; other calls are short."""
LONGEST_PARENT = 16
"""Characters of the path of Ray's folder: a socket's path has 107, of which 25 go to our folder and 66 to Ray's own."""

_QUIET = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_worker_niceness": "0",
}
"""The polling interval is the shortest that does not disturb timed windows; the rest saves a process or a line.

The last but two keeps Ray from printing how its processes ended: that is in the trial's row. The next keeps its
SIGTERM handler, which is in force while it starts, from waiting half a minute. Without the last one Ray has its workers
yield to every other process (niceness 15), Ray's own among them, which trainings that are started otherwise do not."""


Bundles = Sequence[Mapping[str, float]]


class NodeRequest:
    """Bundles of resources that the cluster shall have until ``close``, however large it is now.

    Ray has one request for its autoscaler, which each call of ``request_resources`` replaces. Ray Train, Ray Data and
    this class therefore send theirs to Ray's coordinator, a detached actor that sends the sum to the autoscaler. The
    trainers of the run's worker groups request no nodes. The coordinator forgets a request that is not renewed for
    EXPIRE_S. A thread of the driver renews it; when the driver has died, the request expires, and the autoscaler
    removes idle nodes after its own timeout.
    """

    def __init__(self, renew_s: float = RENEW_S) -> None:
        self._actor: ActorHandle = private.autoscaling_coordinator()
        if self._actor is None:
            raise ClusterError(
                "cluster.wait_for: this version of Ray has no coordinator of requests, by which one expires if the run "
                "is killed; leave cluster.wait_for out, and add the nodes yourself"
            )
        self._name, self._bundles = f"harness-{uuid.uuid4().hex[:12]}", list[dict[str, float]]()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(renew_s,), daemon=True, name="node-request")
        self._thread.start()

    def ask(self, bundles: Bundles) -> None:
        """Request these bundles instead of the earlier ones; raise ClusterError if that is impossible."""
        import ray

        if (wanted := [dict(bundle) for bundle in bundles]) == self._bundles:
            return
        with self._lock:
            self._bundles = wanted
            try:
                ray.get(self._send(), timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"cluster.wait_for: Ray's coordinator of requests does not answer ({type(error).__name__}); "
                    "see 'ray status'"
                ) from error

    def close(self) -> None:
        """Withdraw the request, if the coordinator still answers."""
        import ray

        self._closed.set()
        with self._lock, contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.cancel_request.remote(requester_id=self._name), timeout=ANSWER_S)
        self._thread.join(ANSWER_S)

    def _renew(self, renew_s: float) -> None:
        while not self._closed.wait(renew_s):
            with self._lock, contextlib.suppress(Exception):  # the cluster is gone, which the run notices by itself
                if self._bundles and not self._closed.is_set():
                    self._send()

    def _send(self) -> ObjectRef[object]:
        return self._actor.request_resources.remote(
            requester_id=self._name, resources=self._bundles, expire_after_s=EXPIRE_S
        )


@dataclass(frozen=True)
class Cluster:
    """A connected cluster: one agent a node, and the mailbox on the driver's node.

    ``request``: the run's request for nodes of the autoscaler, if it makes one.
    """

    inventory: Inventory
    mailbox: ActorHandle
    agents: dict[str, ActorHandle]
    embedded: bool
    request: NodeRequest | None = None

    def replace_agents(self, node_ids: Iterable[str]) -> list[str]:
        """Restart agents on nodes that are still alive; return those nodes."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        replaced = [node_id for node_id in node_ids if node_id in alive]
        self.agents.update({node_id: _actor(NodeAgent, node_id) for node_id in replaced})
        return replaced

    def with_nodes_of_now(self) -> Cluster:
        """Return the cluster with the nodes that are alive now: those that it knew first, then new ones.

        Raises ClusterError if a new node does not answer.
        """
        alive = {node["NodeID"]: node for node in live_nodes()}
        known = [node for node in self.inventory.nodes if node.node_id in alive]
        new = [raw for node_id, raw in alive.items() if node_id not in self.agents]
        agents = {node["NodeID"]: _actor(NodeAgent, node["NodeID"]) for node in new}
        described = _described(new, agents)
        self.agents.update(agents)
        return replace(self, inventory=replace(self.inventory, nodes=(*known, *described)))

    def missing_paths(self, paths: Iterable[str], used: Sequence[bool] | None = None) -> dict[str, list[str]]:
        """Return the paths that each node lacks, by host; raise ClusterError if a node does not answer.

        ``used``: which of the inventory's nodes are asked; by default all.
        """
        return self._of_every_node("missing", list(paths), used)

    def failing_imports(
        self,
        modules: Iterable[str],
        used: Sequence[bool] | None = None,
        version: CodeVersion | None = None,
        folder: str | None = None,
    ) -> dict[str, dict[str, str]]:
        """Return the modules that cannot be imported on each node, by host, and why; see ``missing_paths``.

        ``version``: the version of the user's code that the modules are of. ``folder``: that of the code without one,
        if it is on no node's import path.
        """
        asked = sum(used) if used else len(self.inventory.nodes)
        limit_s = IMPORT_PART * start_limit_s(asked)
        return self._of_every_node("failing_imports", list(modules), used, limit_s, version, folder)

    def _of_every_node(self, question: str, about: list[str], used: Sequence[bool] | None, *more: object) -> Json:
        """Return the answers that are not empty, by host."""
        nodes = self.inventory.nodes
        asked = [node for node, is_used in zip(nodes, used or [True] * len(nodes), strict=True) if is_used]
        names = [node.place for node in asked]
        answers = _answers(names, [getattr(self.agents[node.node_id], question).remote(about, *more) for node in asked])
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer}


def local_inventory() -> Inventory:
    """Return the inventory of this machine, without starting Ray."""
    return Inventory((describe_node("local", LOCAL_ADDRESS),))


@contextlib.contextmanager
def start_embedded(inventory: Inventory) -> Iterator[Cluster]:
    """Start Ray on this machine: loopback only, token authentication, no dashboard, no statistics.

    These settings override the environment, which may be meant for another cluster; the user's other settings hold.
    Ray's session folder is removed afterwards.
    """
    closed = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux this binds every port to the loopback interface
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    node = inventory.nodes[0]
    ours = {"address": "local", "include_dashboard": False, "num_cpus": node.cores, "num_gpus": node.gpus}
    with as_ray_reads(_QUIET, closed), Scratch(_sessions()) as folder, contextlib.ExitStack() as stack:
        stack.callback(end_holders, folder)  # what a killed raylet leaves behind checks for it every few seconds only
        stack.enter_context(reaper_for(folder))
        stack.enter_context(session(folder, **ours))
        cluster = _connected(inventory, is_embedded=True)
        address = cluster.inventory.nodes[0].address
        if address != LOCAL_ADDRESS:
            raise ClusterError(
                f"the embedded Ray would listen on {address}, where other machines can reach it, and not on "
                f"{LOCAL_ADDRESS} alone: nothing was run. Start a cluster yourself and give its --address"
            )
        yield cluster


def _sessions() -> Path:
    """Return the parent of Ray's session folder: the names of its sockets are long."""
    wanted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    return wanted if len(str(wanted)) <= LONGEST_PARENT else Path("/tmp")


@contextlib.contextmanager
def connect(address: str, code: Mapping[str, Path]) -> Iterator[Cluster]:
    """Connect to the cluster at an address; raise ClusterError if none answers.

    Ships this package to its workers, and beside it the folders of the user's own ``code``, each to the path that is
    its key; nothing if a Ray job gives them its working directory.
    """
    with as_ray_reads(_QUIET), Scratch() as shipped:
        check_reachable(address)
        environment = None
        if not has_working_dir():
            for place, folder in {"harness": PACKAGE_FOLDER, **code}.items():
                copy_code(folder, shipped / place)
            environment = {"working_dir": str(shipped)}
        with session(address=address, runtime_env=environment):
            cluster = _connected(None, is_embedded=False)
            for agent in cluster.agents.values():
                agent.sweep.remote()  # without waiting
            yield cluster


def copy_code(folder: Path, target: Path) -> None:
    """Copy the Python files below a folder that can be read, without data and results, which may be large."""
    for file in python_files(folder):
        try:
            content = file.read_bytes()
        except OSError:
            continue
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)


def _connected(inventory: Inventory | None, *, is_embedded: bool) -> Cluster:
    import ray

    alive = live_nodes() if inventory is None else [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    agents = {node["NodeID"]: _actor(NodeAgent, node["NodeID"]) for node in alive}
    mailbox = _actor(Mailbox, here, MAILBOX_THREADS)
    if inventory is None:
        inventory = Inventory(_described(alive, agents), attached=True)
    else:
        only = replace(inventory.nodes[0], node_id=here, address=alive[0]["NodeManagerAddress"])
        inventory = Inventory((only,))
    return Cluster(inventory, mailbox, agents, is_embedded)


def live_nodes() -> list[Json]:
    """Return what Ray knows of each node that takes work: alive, and not about to be removed."""
    import ray

    draining = private.draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]


def _described(alive: Sequence[Json], agents: Mapping[str, ActorHandle]) -> tuple[Node, ...]:
    """Return the nodes with the share that Ray may use: physical cores, within the limits given to ``ray start``.

    Nodes that offer no device are left out.
    """
    described = _answers(
        [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive],
        [agents[node["NodeID"]].describe.remote(node["NodeID"], node["NodeManagerAddress"]) for node in alive],
    )
    shares = []
    for node, raw in zip(described, alive, strict=True):
        cpus, gpus = (int(raw["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        model = node.gpu_model if raw["Resources"].get("GPU") else None
        shares.append(replace(node, cores=min(node.cores, cpus), slots=cpus, gpus=gpus, gpu_model=model))
    return tuple(node for node in shares if node.cores or node.gpus)


def _actor(kind: type, node_id: str, threads: int = 1) -> ActorHandle:
    """Return a new actor on exactly this node, which reserves nothing, and answers so many calls at the same time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor_class: Any = ray.remote(num_cpus=0, max_concurrency=threads)(kind)
    return actor_class.options(scheduling_strategy=there).remote()


def _answers(names: Sequence[str], references: Sequence[ObjectRef]) -> list[Any]:
    """Return the answer of each node's agent, in order; raise ClusterError with the node that does not, and why.

    Names may be equal: two raylets of one machine have the same host and address.
    """
    import ray

    until, answers = time.monotonic() + start_limit_s(len(names)), []
    for name, reference in zip(names, references, strict=True):
        try:
            answers.append(ray.get(reference, timeout=max(1.0, until - time.monotonic())))
        except ray.exceptions.RayError as error:
            last = (str(error).strip().splitlines() or [""])[-1].strip()  # of a traceback, what was raised
            raise ClusterError(
                f"{name}: the node does not answer ({type(error).__name__}: {last[:300]}): it needs the packages that "
                "this machine has; see 'ray status'. Nothing was run"
            ) from error
    return answers
