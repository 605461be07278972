"""The nodes of a worker group, and what Ray reserves on them for a worker; no Ray is started."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import ClusterError
from harness.launch.ray import nodes as ray_nodes
from harness.launch.ray.launcher import own_resources, resources_of_named_gpus, shared_resources
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
        self.embedded = False
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


def test_after_a_loss_cell_and_base_move_to_another_type_together() -> None:
    cluster = Cluster(*A[:2], *H)
    nodes = choice(cluster, ONE, SPREAD)
    assert [names(nodes.nodes_for(group(each))) for each in (ONE, SPREAD)] == [["a0"], ["a0", "a1"]]
    cluster.gone = {"a1"}
    assert [names(nodes.nodes_for(group(each))) for each in (ONE, SPREAD)] == [["h0"], ["h0", "h1"]]


def test_a_node_that_drains_takes_no_group(draining: set[str]) -> None:
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


def test_groups_are_kept_together_on_the_type_that_holds_them_all() -> None:
    """The plan's placements prefer one type of nodes, a block that ran on both types needs the other."""
    nodes = choice(Cluster(*A, *H), ONE, FOUR, Placement(3, 12, 1), EIGHT)
    assert names(nodes.nodes_for(group(ONE))) == ["a0"] and names(nodes.nodes_for(group(EIGHT))) == ["h0"]
    assert nodes.keep_together([group(ONE), group(EIGHT)])
    assert names(nodes.nodes_for(group(ONE))) == ["h0"]
    assert not nodes.keep_together([group(EIGHT), group(Placement(3, 12, 1))])
    assert not nodes.keep_together([group(Placement(5, 20, 1))])  # on both types
    assert not nodes.keep_together([group(Placement(6, 24, 1))])  # on none


def test_types_in_order() -> None:
    nodes = [(A[0], 4), (H[0], 8), (A[1], 4)]
    assert types_in_order(nodes, [ONE]) == ["A100, None", "H100, None"]
    assert types_in_order(nodes, [ONE, EIGHT]) == ["H100, None", "A100, None"]
    assert types_in_order(nodes, [ONE, SPREAD]) == ["A100, None", "H100, None"]
    named = Placement(1, 2, 1, device_ids=(3, 7))
    assert types_in_order(nodes, [named]) == ["H100, None", "A100, None"]


def test_a_worker_has_all_of_its_devices_and_named_gpus_take_the_whole_node() -> None:
    assert own_resources(Placement(1, 1, 2), 4, on_gpus=True) == {"CPU": 8, "GPU": 2.0}
    assert own_resources(Placement(1, 2, 1), 1, on_gpus=False) == {"CPU": 1}
    assert resources_of_named_gpus(Placement(1, 2, 1, (1, 2)), 4, gpus=8) == {"CPU": 4, "GPU": 4.0}
    assert resources_of_named_gpus(Placement(1, 1, 2, (1, 2)), 4, gpus=8) == {"CPU": 8, "GPU": 8.0}


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
    assert shared_resources(placement, cores, gpus) == resources
