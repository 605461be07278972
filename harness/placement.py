"""How many processes on how many devices and nodes a strategy needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.cell import Cell


@dataclass(frozen=True, order=True)
class Placement:
    """Workers on nodes, split evenly; each worker drives its own devices."""

    nodes: int
    workers: int
    devices_per_worker: int

    @property
    def devices(self) -> int:
        return self.workers * self.devices_per_worker

    @property
    def workers_per_node(self) -> int:
        return self.workers // self.nodes

    @property
    def devices_per_node(self) -> int:
        return self.workers_per_node * self.devices_per_worker

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.workers} x {self.devices_per_worker} device{'s' * (self.devices_per_worker > 1)}{nodes}"


ONE_PROCESS: Mapping[str, bool] = {"single": True, "dp": True, "ddp": False, "fsdp": False}
"""Whether one process drives all devices, or each device has a process of its own."""


def place(cell: Cell) -> Placement:
    """The placement a cell asks for. Whether a cluster has it is asked elsewhere."""
    if ONE_PROCESS[cell.strategy]:
        return Placement(nodes=cell.nodes, workers=1, devices_per_worker=cell.devices)
    return Placement(nodes=cell.nodes, workers=cell.devices, devices_per_worker=1)
