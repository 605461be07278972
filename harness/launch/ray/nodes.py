"""The nodes of a worker group: alive, of one type if possible, the same in every block; their agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.cluster import Cluster
from harness.launch.supervision import Answers
from harness.plan.cell import Placement
from harness.plan.inventory import Machine, Node
from harness.plan.trial import WorkerGroup
from harness.system.process import in_thread, interrupted

ANSWER_S = 15.0
"""Timeout of a node's answer about its processes."""
HURRY_S = 3.0
"""Timeout of an answer after an interruption, which may have ended Ray's own processes too."""
POLL_S = 2.0
"""The pause between two looks for nodes that replace lost ones."""


def patience() -> float:
    """Return the timeout of an answer."""
    return HURRY_S if interrupted() else ANSWER_S


def ask_agents(cluster: Cluster, question: str, things: Sequence[tuple[str, object]]) -> Answers:
    """Return one answer a (node id, subject), in order, from one question a node; None if a node does not answer.

    An agent that has died on a live node is replaced, and the new one asked; if that dies too, or the node is gone,
    the agent counts as lost and is not asked again.
    """
    by_node: dict[str, list[int]] = {}
    for place, (node_id, _) in enumerate(things):
        by_node.setdefault(node_id, []).append(place)
    asked = {node: [things[place][1] for place in places] for node, places in by_node.items()}
    given, dead = _answers(cluster, question, asked)
    if dead and not interrupted():  # else Ray itself may be ending
        replaced: list[str] = []
        with suppress(Exception, SystemExit):  # Ray's own requests fail, or never end, once its head is gone
            replaced = in_thread(lambda: cluster.replace_agents(dead)).result(patience())
        again, dead_again = _answers(cluster, question, {node: asked[node] for node in replaced})
        for node in dead:
            if node not in replaced or node in dead_again:  # a new one that is only slow is asked again
                cluster.agents.pop(node, None)
        given |= again
    answers: Answers = [None] * len(things)
    for node, from_node in given.items():
        for place, answer in zip(by_node[node], from_node or [], strict=False):
            answers[place] = answer
    return answers


def _answers(cluster: Cluster, question: str, asked: Mapping[str, list[object]]) -> tuple[dict[str, Any], list[str]]:
    """Return the answers of these nodes' agents, and the nodes whose agent is dead."""
    given, dead = {}, []
    references = {
        node: getattr(cluster.agents[node], question).remote(about)
        for node, about in asked.items()
        if node in cluster.agents
    }
    for node, reference in references.items():
        try:
            given[node] = ray.get(reference, timeout=patience())
        except ray.exceptions.ActorDiedError:
            dead.append(node)
        except ray.exceptions.RayError:
            continue
    return given, dead


def dead_node(nodes: Sequence[Node]) -> str | None:
    """Return the host and address of a node that Ray's table of nodes holds for dead; None if Ray does not answer."""
    try:  # in a thread: Ray's own requests fail, or never end, once its head is gone
        alive = in_thread(lambda: {node["NodeID"] for node in ray.nodes() if node["Alive"]}).result(patience())
    except (Exception, SystemExit):
        return None
    return next((node.place for node in nodes if node.node_id not in alive), None)


@dataclass
class NodeChoice:
    """Chooses among the nodes of the plan, and those that the autoscaler brings for lost ones.

    A ratio needs a cell and its base on the same hardware: the type of nodes of which enough are left for the most of
    the plan's ``placements`` comes first. ``wait_s``: timeout of a group without enough nodes for others; 0 after the
    first timeout, and if the run requests no nodes. ``say`` shows the user a line.
    """

    cluster: Cluster
    machine: Machine
    placements: Sequence[Placement] = ()
    wait_s: float = 0.0
    say: Callable[[str], None] = lambda text: None
    sleep: Callable[[float], None] = time.sleep
    _others: list[tuple[Node, int]] = field(default_factory=list)

    def nodes_for(self, group: WorkerGroup, deadline: float | None = None) -> list[Node]:
        """Return the nodes of a group; fewer than its placement's if there are not enough, also by ``deadline``."""
        found = self._choose(group)
        if len(found) == group.placement.nodes or not self.cluster.request:
            return found
        left_s = self.wait_s if deadline is None else min(self.wait_s, max(0.0, deadline - time.time()))
        until, needed = time.monotonic() + left_s, group.placement.nodes
        if left_s:
            self.say(f"{group}: {len(found)} of {needed} nodes are left; waiting at most {left_s:.0f} s for others")
        while True:
            self._look_for_others()
            found = self._choose(group)
            if len(found) == needed:
                return found
            if time.monotonic() >= until:
                self.wait_s = 0.0
                return found
            self.sleep(POLL_S)

    def _choose(self, group: WorkerGroup) -> list[Node]:
        placement, alive = group.placement, self._alive()
        needed = 1 if group.oversubscribe else devices_needed(placement)
        fitting = [node for node, devices in alive if devices >= needed]
        for hardware in types_in_order(alive, self.placements or [placement]):
            same = [node for node in fitting if node.hardware == hardware]
            if len(same) >= placement.nodes:
                return same[: placement.nodes]
        return fitting[: placement.nodes]

    def _alive(self) -> list[tuple[Node, int]]:
        """Return the nodes whose agents answer, with their devices; a cluster of one node is not asked."""
        per_node = self.machine.devices_per_node
        nodes = [*zip(self.cluster.inventory.nodes, per_node, strict=True), *self._others]
        if len(nodes) == 1 and not self.cluster.request:
            return nodes
        draining = private.draining_nodes()
        asked = [(node, devices) for node, devices in nodes if node.node_id not in draining]
        answers = ask_agents(self.cluster, "alive", [(node.node_id, 1) for node, _ in asked])
        return [pair for pair, answer in zip(asked, answers, strict=True) if answer is not None]

    def _look_for_others(self) -> None:
        """Take in new nodes that are like one of the plan."""
        per_node = self.machine.devices_per_node
        devices = {node.shape: n for node, n in zip(self.cluster.inventory.nodes, per_node, strict=True)}
        with suppress(ClusterError):  # it is gone again, or is asked again
            now = self.cluster.with_nodes_of_now()
            new = [node for node in now.inventory.nodes if node not in self.cluster.inventory.nodes]
            self._others += [(node, devices[node.shape]) for node in new if node.shape in devices]


def types_in_order(nodes: Iterable[tuple[Node, int]], placements: Sequence[Placement]) -> list[str]:
    """Return the hardware of nodes with these devices: first what holds the most placements, then as they stand."""
    by_type: dict[str, list[int]] = {}
    for node, devices in nodes:
        by_type.setdefault(node.hardware, []).append(devices)

    def held(hardware: str) -> int:
        sizes = by_type[hardware]
        return sum(sum(size >= devices_needed(each) for size in sizes) >= each.nodes for each in placements)

    return sorted(by_type, key=held, reverse=True)


def devices_needed(placement: Placement) -> int:
    """Return the devices that each node of a placement needs; named GPUs count from 0."""
    return max([placement.devices_per_node, *(number + 1 for number in placement.device_ids)])
