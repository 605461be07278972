"""What a plan lacks that a growing cluster could bring: the bundles of devices to request from its autoscaler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.plan.cell import Cell, place
from harness.plan.inventory import Inventory, Machine
from harness.plan.planner import Plan

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


Bundles = Sequence[Mapping[str, float]]


def lacking(plan: Plan) -> list[Cell]:
    """Return the cells that more nodes could run."""
    return list(dict.fromkeys(skip.trial.cell for skip in plan.skips if skip.skip_code == LACKING))


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
