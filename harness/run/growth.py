"""Waiting for the nodes that the cluster's autoscaler, or someone by hand, has to bring before the plan is made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from harness.config.experiment import Experiment
from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.cluster import Bundles, Cluster, NodeRequest, live_nodes
from harness.plan.cell import Cell, place
from harness.plan.inventory import Inventory, Machine
from harness.plan.planner import Plan
from harness.run.events import Emit, Note

POLL_S = 2.0
"""The pause between two looks at the cluster's nodes."""
REMIND_S = 60.0
"""The time between two messages of a long wait."""

Replan = Callable[[Experiment, Inventory], Plan]


class GrowingRay:
    """A Ray cluster and the run's request for its nodes, which ``stack`` withdraws."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        request = NodeRequest()
        stack.callback(request.close)
        self._request, self._seen = request, _ids()
        self._asked, self._asked_at = _counted([]), 0
        self.cluster = replace(cluster, request=request)

    @property
    def inventory(self) -> Inventory:
        """The nodes that it is known to have."""
        return self.cluster.inventory

    def ask(self, bundles: Bundles) -> None:
        """Request these resources in all, until the run ends."""
        self._request.ask(bundles)
        if (asked := _counted(bundles)) != self._asked:
            self._asked, self._asked_at = asked, private.autoscaler_state().version

    def refuses(self) -> bool:
        """Return whether its autoscaler says that it cannot meet the request."""
        state = private.autoscaler_state()
        if state.answered <= self._asked_at:  # a refusal of an earlier, larger request would hold this one too
            return False
        return any(self._asked <= _counted(request) for request in state.refused)

    def look(self) -> bool:
        """Take in the nodes that it has now; return whether they changed."""
        now = _ids()
        if now == self._seen:
            return False
        try:
            self.cluster = self.cluster.with_nodes_of_now()
        except ClusterError:
            if _ids() == now:
                raise
            return False  # it was gone before it answered
        self._seen = now
        return True


def _counted(bundles: Bundles) -> Counter[str]:
    """Return the number of bundles of each kind; requests of other drivers may be beside ours."""
    return Counter(str(sorted((name, float(amount)) for name, amount in bundle.items())) for bundle in bundles)


def _ids() -> set[str]:
    return {str(node["NodeID"]) for node in live_nodes()}


@dataclass
class Wait:
    """A wait for nodes, of at most ``seconds``."""

    cluster: GrowingRay
    seconds: float
    emit: Emit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _given_up: set[Demand] = field(default_factory=set)

    def plan(self, experiment: Experiment, replan: Replan) -> Plan:
        """Request what the largest cells need, wait for it, and return the plan on what came.

        The cells whose nodes did not come in time are skipped, with that reason. If the autoscaler cannot meet the
        request, the largest cells that lack nodes are given up, one size after the other.
        """
        began = said = self.clock()
        plan = replan(experiment, self.cluster.inventory)
        if missing := self._request(plan):
            self.emit(Note(f"Waiting at most {self.seconds:.0f} s for nodes: {missing}"))
        while missing and self.clock() - began < self.seconds:
            self.sleep(min(POLL_S, self.seconds))
            if self.cluster.look():
                plan = replan(experiment, self.cluster.inventory)
            elif self.cluster.refuses():
                self._give_up(plan)
            elif self.clock() - said < REMIND_S:
                continue
            said, missing = self.clock(), self._request(plan)
            left = missing or f"no more to wait for: {self.cluster.inventory}"
            self.emit(Note(f"After {said - began:.0f} s: {left}"))
        if not missing:
            return plan
        self.emit(Note(f"No more nodes came in {self.seconds:.0f} s; what fits on {self.cluster.inventory} is run"))
        return replan(experiment, replace(self.cluster.inventory, waited_s=self.seconds))

    def _request(self, plan: Plan) -> str:
        """Request what the plan needs; return what its largest cell lacks, as text."""
        self.cluster.ask(needed_bundles(plan, self._given_up))
        cells = self._awaited(plan)
        if not cells:
            return ""
        reasons = {trial.cell: reason.text for trial, reason in plan.skips.items()}
        return f"{len(cells)} cell{'s' * (len(cells) > 1)} cannot run yet; {reasons[cells[-1]]}"

    def _awaited(self, plan: Plan) -> list[Cell]:
        """Return the cells that lack nodes and are not given up, the largest last."""
        cells = [cell for cell in lacking(plan) if demand_of(plan, cell) not in self._given_up]
        return sorted(cells, key=lambda cell: demand_of(plan, cell).size)

    def _give_up(self, plan: Plan) -> None:
        """Give up the largest of the demands that are awaited."""
        largest = demand_of(plan, self._awaited(plan)[-1])
        self._given_up.add(largest)
        each = f"{largest.devices} devices" if largest.devices > 1 else "1 device"
        self.emit(Note(f"The autoscaler cannot bring {largest.bundles} times {each}: such cells are skipped"))


LACKING = "too_few_devices"


@dataclass(frozen=True)
class Demand:
    """The devices of one cell: ``bundles`` of ``devices`` each, a bundle on one node; ``apart``: no two on the same."""

    bundles: int
    devices: int
    apart: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """What demands are ordered by: their devices, and how many of them are together."""
        return self.bundles * self.devices, self.devices


def lacking(plan: Plan) -> list[Cell]:
    """Return the cells that more nodes could run."""
    return list(dict.fromkeys(trial.cell for trial, reason in plan.skips.items() if reason.code == LACKING))


def needed_bundles(plan: Plan, given_up: Collection[Demand] = ()) -> list[dict[str, float]]:
    """Return the resources, as Ray counts them, with which the largest cells of the plan can run, one at a time.

    They are those of the whole cluster, not only what it lacks: an autoscaler counts the nodes that are there.
    ``given_up``: what it cannot bring; with a request that it cannot meet as a whole it may bring no node at all.
    """
    demands = {demand_of(plan, trial.cell) for trial in plan.trials if not trial.cell.oversubscribed}
    demands |= {demand_of(plan, cell) for cell in lacking(plan)} - set(given_up)
    on_gpus = plan.machine.device == "cuda"
    key, each = ("GPU", 1) if on_gpus else ("CPU", cpus_of_a_slot(plan.inventory, plan.machine))
    return [{key: float(size * each)} for size in joint_bundles(demands)]


def demand_of(plan: Plan, cell: Cell) -> Demand:
    """Return what a cell needs: any nodes hold it, unless the file, its strategy or named GPUs say on how many.

    A bundle of a cell on several nodes is as large as the smallest node that can hold it: two smaller ones could be
    on the same.
    """
    per_node = max([place(cell).devices_per_node, *(number + 1 for number in cell.device_ids)])
    if cell.nodes > 1:
        there = plan.machine.devices_per_node
        return Demand(cell.nodes, min((size for size in there if size >= per_node), default=per_node), apart=True)
    one_node = any(1 in (grid.nodes or ()) for grid in plan.experiment.grids)
    free = not (one_node or cell.traits.one_process or cell.device_ids)
    return Demand(per_node, 1) if free else Demand(1, per_node)


def joint_bundles(demands: Iterable[Demand]) -> list[int]:
    """Return sizes in devices, the largest first, that hold each of the demands, though not two at the same time.

    8 on one node, and 10 on any: one of 8 and two of 1.
    """
    found: list[int] = []
    for demand in sorted(demands, key=lambda each: (-each.devices, not each.apart)):
        held = [1 if demand.apart else size // demand.devices for size in found if size >= demand.devices]
        found += [demand.devices] * (demand.bundles - sum(held))
    return sorted(found, reverse=True)


def cpus_of_a_slot(inventory: Inventory, machine: Machine) -> int:
    """Return the CPUs, as Ray counts them, that a node offers for each of its CPU slots; the fewest of all nodes.

    A node of 4 cores with two threads each offers 8: with 2 threads per device it has 2 slots of 4 CPUs.
    """
    offered = [
        (node.cores if node.slots is None else node.slots) // devices
        for node, devices in zip(inventory.nodes, machine.devices_per_node, strict=True)
        if devices
    ]
    return max(1, min(offered, default=machine.threads_per_device))
