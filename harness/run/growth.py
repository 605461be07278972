"""Waiting for the nodes that the cluster's autoscaler, or someone by hand, has to bring before the plan is made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from harness.config.experiment import Experiment
from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.cluster import Cluster, NodeRequest, live_nodes
from harness.plan.cell import Cell
from harness.plan.inventory import Inventory
from harness.plan.node_demand import Bundles, Demand, demand_of, lacking, needed_bundles
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
        reasons = {skip.trial.cell: skip.reason for skip in plan.skips}
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
