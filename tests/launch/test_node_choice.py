"""The nodes of a worker group, what Ray reserves on them, and the request for nodes; no Ray is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.core.generated import autoscaler_pb2 as messages
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

from harness.errors import ClusterError
from harness.launch.ray import nodes as ray_nodes
from harness.launch.ray import private
from harness.launch.ray.cluster import EXPIRE_S, RENEW_S, Bundles, NodeRequest
from harness.launch.ray.launcher import worker_resources
from harness.launch.ray.nodes import POLL_S, NodeChoice, types_in_order
from harness.plan.cell import Placement
from harness.plan.inventory import Inventory, Machine, Node
from harness.plan.trial import WorkerGroup

A = [Node(f"a{i}", f"10.0.0.{i}", f"a{i}", 32, 4, "A100") for i in range(3)]
H = [Node(f"h{i}", f"10.0.1.{i}", f"h{i}", 32, 8, "H100") for i in range(2)]
ONE, FOUR, EIGHT = Placement(1, 1, 1), Placement(1, 4, 1), Placement(1, 8, 1)
SPREAD = Placement(2, 8, 1)


def group(placement: Placement) -> WorkerGroup:
    return WorkerGroup("g", 0, placement, "cuda", False, ())


class Cluster:
    """Nodes that are alive or gone. ``come``: those that the autoscaler brings, by the look at which."""

    def __init__(self, *nodes: Node) -> None:
        self.inventory = Inventory(nodes, attached=True)
        self.request: object | None = None
        self.gone: set[str] = set()
        self.come: list[list[Node]] = []

    def with_nodes_of_now(self) -> Any:
        nodes = self.come.pop(0) if self.come else []
        if nodes and nodes[0].host == "broken":
            raise ClusterError("it does not answer")
        return SimpleNamespace(inventory=replace(self.inventory, nodes=(*self.inventory.nodes, *nodes)))


@pytest.fixture(autouse=True)
def _agents_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(cluster: Cluster, question: str, things: Any) -> list[bool | None]:
        return [None if name in cluster.gone else True for name, _ in things]

    monkeypatch.setattr(ray_nodes, "ask_agents", ask)


def choice(cluster: Cluster, *placements: Placement, **more: Any) -> NodeChoice:
    machine = Machine("cuda", 8, tuple(node.gpus for node in cluster.inventory.nodes), compiler=True)
    given: Any = cluster
    return NodeChoice(given, machine, placements, **more)


def names(found: list[Node]) -> list[str]:
    return [node.node_id for node in found]


@pytest.fixture(autouse=True)
def draining(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    ids: set[str] = set()
    monkeypatch.setattr(ray_nodes.private, "draining_nodes", lambda: ids)
    return ids


@pytest.mark.parametrize(
    ("nodes", "placements", "chosen"),
    [
        ([A[0], *H], (ONE, FOUR, EIGHT), [["h0"], ["h0"], ["h0"]]),  # the type that holds the most of the plan
        ([A[0], *H], (ONE, FOUR), [["a0"], ["a0"]]),  # of types that hold as much the first
        ([A[0], H[0]], (SPREAD,), [["a0", "h0"]]),  # no type holds it alone
    ],
)
def test_every_group_runs_on_the_type_that_holds_the_most_of_the_plan(
    nodes: list[Node], placements: tuple[Placement, ...], chosen: list[list[str]]
) -> None:
    by = choice(Cluster(*nodes), *placements)
    assert [names(by.nodes_for(group(each))) for each in placements] == chosen


def test_after_a_loss_cell_and_base_move_together_and_a_draining_node_takes_no_group(draining: set[str]) -> None:
    cluster = Cluster(*A[:2], *H)
    nodes = choice(cluster, ONE, SPREAD)
    assert [names(nodes.nodes_for(group(each))) for each in (ONE, SPREAD)] == [["a0"], ["a0", "a1"]]
    cluster.gone = {"a1"}
    assert [names(nodes.nodes_for(group(each))) for each in (ONE, SPREAD)] == [["h0"], ["h0", "h1"]]
    nodes = choice(Cluster(*A), FOUR)
    draining.add("a0")
    assert names(nodes.nodes_for(group(FOUR))) == ["a1"]


def test_a_lost_node_is_replaced_by_one_of_its_shape_that_the_autoscaler_brings() -> None:
    cluster = Cluster(*A[:2])
    cluster.request, cluster.gone = object(), {"a0"}
    broken = replace(A[2], host="broken")
    cluster.come = [[], [broken], [H[0]], [A[2]]]
    waited, said = list[float](), list[str]()
    nodes = choice(cluster, SPREAD, wait_s=600.0, sleep=waited.append, say=said.append)
    assert names(nodes.nodes_for(group(SPREAD))) == ["a1", "a2"]
    assert waited == [POLL_S] * 3
    assert names(nodes.nodes_for(group(SPREAD))) == ["a1", "a2"] and len(waited) == 3  # in every block
    assert said == ["8 workers with 1 device each on 2 nodes: 1 of 2 nodes are left; waiting at most 600 s for others"]


@pytest.mark.parametrize(
    ("can_grow", "wait_s", "deadline", "waited_s"),
    [(False, 600.0, None, 0.0), (True, 10.0, None, 10.0), (True, 600.0, 5008.0, 8.0)],
    ids=["no autoscaler", "a wait in vain", "the end of the run"],
)
def test_a_wait_for_nodes_ends_at_its_limit_or_with_the_run_and_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, can_grow: bool, wait_s: float, deadline: float | None, waited_s: float
) -> None:
    cluster, now, said = Cluster(*A[:2]), [0.0], list[str]()
    cluster.request, cluster.gone = object() if can_grow else None, {"a0"}
    monkeypatch.setattr(ray_nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_nodes.time, "time", lambda: 5000.0 + now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    nodes = choice(cluster, SPREAD, wait_s=wait_s, sleep=sleep, say=said.append)
    for _ in range(2):
        assert names(nodes.nodes_for(group(SPREAD), deadline=deadline)) == ["a1"] and now == [waited_s]
    assert [line.partition("; ")[2] for line in said] == [f"waiting at most {waited_s:.0f} s for others"] * can_grow


def test_types_in_order() -> None:
    nodes = [(A[0], 4), (H[0], 8), (A[1], 4)]
    assert types_in_order(nodes, [ONE]) == ["A100, None", "H100, None"]
    assert types_in_order(nodes, [ONE, EIGHT]) == ["H100, None", "A100, None"]
    assert types_in_order(nodes, [ONE, SPREAD]) == ["A100, None", "H100, None"]
    named = Placement(1, 2, 1, device_ids=(3, 7))
    assert types_in_order(nodes, [named]) == ["H100, None", "A100, None"]


def reserved(placement: Placement, cores: int, gpus: int, **group: Any) -> dict[str, float]:
    """What Ray reserves for a worker on nodes of these, of which a device has 4 cores, or a CPU slot one."""
    machine = Machine("cuda", 1, (8,), compiler=True, cpus_per_device=4.0 if gpus else 1.0)
    given = WorkerGroup("g", 0, placement, "cuda" if gpus else "cpu", trials=(), **group)
    return worker_resources(given, machine, [Node("n0", "", "", cores, gpus)] * placement.nodes)


def test_a_worker_has_all_of_its_devices_and_named_gpus_take_the_whole_node() -> None:
    assert reserved(Placement(1, 1, 2), 32, 8, oversubscribe=False) == {"CPU": 8, "GPU": 2.0}
    assert reserved(Placement(1, 2, 1), 32, 0, oversubscribe=False) == {"CPU": 1}
    assert reserved(Placement(1, 2, 1, (1, 2)), 32, 8, oversubscribe=False) == {"CPU": 4, "GPU": 4.0}
    assert reserved(Placement(1, 1, 2, (1, 2)), 32, 8, oversubscribe=False) == {"CPU": 8, "GPU": 8.0}
    assert reserved(Placement(1, 2, 1), 2, 0, oversubscribe=False, variants=("a", "b")) == {"CPU": 0.5}
    assert reserved(Placement(1, 1, 2), 2, 0, oversubscribe=False, variants=("a", "b", "c")) == {"CPU": 0.66}


@pytest.mark.parametrize(
    ("placement", "cores", "gpus", "resources"),
    [
        (Placement(1, 4, 1), 2, 0, {"CPU": 0.5}),
        (Placement(1, 3, 1), 2, 0, {"CPU": 0.66}),  # never more than there is: Ray would wait
        (Placement(1, 4, 1), 8, 2, {"CPU": 2, "GPU": 0.5}),
        (Placement(1, 3, 1), 8, 1, {"CPU": 2, "GPU": 0.3333}),
        (Placement(1, 3, 1), 8, 2, {"CPU": 2, "GPU": 0.5}),
        (Placement(1, 1, 4), 8, 2, {"CPU": 8, "GPU": 2.0}),  # one process drives both
        (Placement(1, 2, 1), 8, 2, {"CPU": 4, "GPU": 1.0}),
    ],
)
def test_workers_that_share_devices_share_the_node(
    placement: Placement, cores: int, gpus: int, resources: dict[str, float]
) -> None:
    assert reserved(placement, cores, gpus, oversubscribe=True) == resources


BUNDLE = {"CPU": 1.0}
TICK_S = _AutoscalingCoordinatorActor.TICK_INTERVAL_S
FREE_S = 300
"""The time within which nodes are free after the driver was killed."""


class Autoscaler:
    """Ray's coordinator, as an actor in this process. ``asked``: what it sent to the autoscaler, each time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[list[dict[str, float]]] = []
        self._actor = _AutoscalingCoordinatorActor(
            get_current_time=lambda: self.now,
            send_resources_request=lambda bundles, label_selectors=None: self.asked.append(bundles),
            get_cluster_nodes=list,
        )
        self.request_resources = SimpleNamespace(remote=self._actor.request_resources)
        self.cancel_request = SimpleNamespace(remote=self._actor.cancel_request)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds // TICK_S)):
            self.now += TICK_S
            self._actor._tick()


class Trainer:
    """The part of a trainer that starts its controller; returns the policy that the controller gets."""

    def _initialize_and_run_controller(self, *, scaling_policy: Any, more: int) -> Any:
        assert more == 1
        return scaling_policy


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Autoscaler:
    actor = Autoscaler()
    monkeypatch.setattr(private, "autoscaling_coordinator", lambda: actor)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return actor


@pytest.fixture
def request_of(autoscaler: Autoscaler) -> Iterator[NodeRequest]:
    request = NodeRequest(renew_s=3600)
    yield request
    request.close()


def test_requests_of_others_are_kept_beside_it(autoscaler: Autoscaler, request_of: NodeRequest) -> None:
    for _ in range(3):
        request_of.ask([BUNDLE] * 4)
    assert autoscaler.asked == [[BUNDLE] * 4], "the same bundles are requested once"
    autoscaler.request_resources.remote(requester_id="other", resources=[BUNDLE], expire_after_s=180)
    assert autoscaler.asked[-1] == [BUNDLE] * 5
    request_of.ask([BUNDLE] * 2)
    assert autoscaler.asked[-1] == [BUNDLE] * 3
    request_of.close()
    assert autoscaler.asked[-1] == [BUNDLE]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trainer_of_the_run_requests_nothing(autoscaler: Autoscaler, request_of: NodeRequest, workers: int) -> None:
    """The policy of a worker group, through the life of its controller: before, inside and after the group."""
    request_of.ask([BUNDLE] * 2)
    trainer = Trainer()
    private.leave_out_requests(trainer)
    policy = trainer._initialize_and_run_controller(
        scaling_policy=FixedScalingPolicy(scaling_config=ScalingConfig(num_workers=workers)), more=1
    )
    assert isinstance(policy, FixedScalingPolicy) and type(policy) is not FixedScalingPolicy
    policy = cloudpickle.loads(cloudpickle.dumps(policy))
    policy.after_controller_start(SimpleNamespace(run_id="1"))
    decision = policy.make_decision_for_non_running_worker_group()
    assert decision.num_workers == workers
    policy.make_decision_for_running_worker_group(None, None)
    asyncio.run(policy.before_controller_shutdown())
    policy.before_controller_abort()
    assert autoscaler.asked == [[BUNDLE] * 2]


def test_a_request_that_is_not_renewed_expires(autoscaler: Autoscaler, request_of: NodeRequest) -> None:
    """After kill -9 nobody renews it."""
    request_of.ask([BUNDLE] * 4)
    autoscaler.pass_time(EXPIRE_S - TICK_S)
    assert len(autoscaler.asked[-1]) == 4
    autoscaler.pass_time(2 * TICK_S)
    assert autoscaler.asked[-1] == []
    assert autoscaler.now < FREE_S / 2
    assert RENEW_S * 3 < EXPIRE_S  # two renewals may fail


def test_a_thread_renews_it_until_it_is_closed(autoscaler: Autoscaler) -> None:
    send, sent = autoscaler.request_resources.remote, list[Bundles]()

    def counted(*, resources: Any, **more: Any) -> None:
        sent.append(resources)
        send(resources=resources, **more)

    autoscaler.request_resources.remote = counted
    request = NodeRequest(renew_s=0.01)
    time.sleep(0.05)
    assert not sent  # nothing is requested yet
    request.ask([BUNDLE])
    until = time.monotonic() + 30
    while len(sent) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    request.close()
    count = len(sent)
    assert sent[:2] == [[BUNDLE]] * 2 and autoscaler.asked[-1] == []
    time.sleep(0.05)
    assert len(sent) == count


def test_the_requests_that_the_autoscaler_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*requests: list[tuple[dict[str, float], int]]) -> bytes:
        state = messages.AutoscalingState(last_seen_cluster_resource_state_version=6)
        for request in requests:
            constraint = state.infeasible_cluster_resource_constraints.add()
            for bundle, count in request:
                constraint.resource_requests.add(request={"resources_bundle": bundle}, count=count)
        resources = messages.ClusterResourceState(cluster_resource_state_version=7)
        reply = messages.GetClusterStatusReply(autoscaling_state=state, cluster_resource_state=resources)
        return reply.SerializeToString()

    class Client:
        reply = status()

        def __init__(self, address: str) -> None: ...

        def get_cluster_status(self) -> bytes:
            return self.reply

    known = private.find
    monkeypatch.setattr(private, "find", lambda module, name: None)  # a Ray without its private names
    assert private.autoscaler_state() == private.AutoscalerState() and private.draining_nodes() == set()
    with pytest.raises(ClusterError, match="has no coordinator of requests"):
        NodeRequest()
    monkeypatch.setattr(private, "find", lambda module, name: Client if name == "GcsClient" else known(module, name))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    assert private.autoscaler_state() == (7, 6, [])
    Client.reply = status([({"GPU": 8.0}, 1), ({"GPU": 1.0}, 2)])
    assert private.autoscaler_state() == (7, 6, [[{"GPU": 8.0}, {"GPU": 1.0}, {"GPU": 1.0}]])
