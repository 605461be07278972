"""The placement of a cell: processes, devices and nodes."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan.cell import Cell, format_gpu_ids


@dataclass(frozen=True, order=True)
class Placement:
    """Workers, split evenly over nodes, each with its own devices.

    ``device_ids``: the GPUs of the first worker, then those of the second, and so on; empty if any GPUs will do.
    """

    nodes: int
    workers: int
    devices_per_worker: int
    device_ids: tuple[int, ...] = ()

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
        which = f" on GPU {format_gpu_ids(self.device_ids)}" if self.device_ids else ""
        devices = f"{self.devices_per_worker} device{'s' * (self.devices_per_worker > 1)}"
        workers = f"1 worker with {devices}" if self.workers == 1 else f"{self.workers} workers with {devices} each"
        return f"{workers}{nodes}{which}"

    def ids_of(self, local_rank: int) -> tuple[int, ...]:
        """Return the numbers of this worker's GPUs on the node; empty if any GPUs will do."""
        first = local_rank * self.devices_per_worker
        return self.device_ids[first : first + self.devices_per_worker]


def place(cell: Cell) -> Placement:
    """Return the placement of a cell. Whether a machine can hold it is decided by plan/feasibility.py."""
    if cell.traits.one_process:
        return Placement(cell.nodes, workers=1, devices_per_worker=cell.devices, device_ids=cell.device_ids)
    return Placement(cell.nodes, workers=cell.devices, devices_per_worker=1, device_ids=cell.device_ids)
