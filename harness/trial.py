"""What a plan is made of: trials, the worker groups they share, and what is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.cell import Cell
from harness.placement import Placement

Kind = Literal["throughput", "convergence"]


@dataclass(frozen=True)
class Trial:
    """One cell in one block, or, for convergence, one cell with one seed."""

    cell: Cell
    kind: Kind
    block: int
    seed: int
    added: bool = False

    @property
    def id(self) -> str:
        repeat = f"b{self.block}" if self.kind == "throughput" else f"s{self.seed}"
        return f"{self.cell.id}-{repeat}"

    @property
    def label(self) -> str:
        repeat = f"block {self.block}" if self.kind == "throughput" else f"seed {self.seed}"
        return f"{self.cell.label} · {repeat}"


@dataclass(frozen=True)
class WorkerGroup:
    """Fresh processes that run the trials of one block that need the same placement."""

    id: str
    block: int
    placement: Placement
    device: str
    oversubscribe: bool
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Skip:
    """A trial that will not be started, and why."""

    trial: Trial
    reason: str
