"""The choice of a worker group's nodes: alive, of one type if one can hold the group, and the same in every block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.agents import ask_agents
from harness.launch.ray.cluster import Cluster
from harness.plan.inventory import Machine, Node
from harness.plan.placement import Placement
from harness.plan.trial import WorkerGroup

POLL_S = 2.0
"""The pause between two looks for nodes that replace lost ones."""


def silent(text: str) -> None:
    """Show nothing."""


@dataclass
class NodeChoice:
    """Chooses among the nodes of the plan, and those that the autoscaler brings for lost ones.

    Ratios need a cell and its base on the same hardware. So types of nodes have an order: first the one whose nodes
    that are left hold the most of the plan's ``placements``. ``wait_s``: how long a group without enough nodes waits
    for others, until that was in vain once; 0 if the run holds no request for nodes. ``say`` shows the user a line.
    """

    cluster: Cluster
    machine: Machine
    placements: Sequence[Placement] = ()
    wait_s: float = 0.0
    say: Callable[[str], None] = silent
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

    def keep_together(self, groups: Sequence[WorkerGroup]) -> bool:
        """Order the types of nodes by what holds most of these groups; return whether one type now holds them all."""
        self.placements = [group.placement for group in groups]
        chosen = [(group, self._choose(group)) for group in groups]
        enough = all(len(nodes) == group.placement.nodes for group, nodes in chosen)
        return enough and len({node.hardware for _, nodes in chosen for node in nodes}) == 1

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
        draining = set() if self.cluster.embedded else private.draining_nodes()
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
