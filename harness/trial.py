"""What a plan is made of: trials, the worker groups they share, and what is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.cell import Cell
from harness.placement import Placement

Kind = Literal["throughput", "convergence", "diagnostic"]
Purpose = Literal["", "twin", "explain", "equivalence", "doctor"]
"""Of a diagnostic trial: the base once more, a part of the waterfall, the check before strategies are compared, the
examination of a cell before it is measured."""


@dataclass(frozen=True)
class Trial:
    """One cell in one block, or, for convergence, one cell with one seed."""

    cell: Cell
    kind: Kind
    block: int
    seed: int
    added: bool = False
    purpose: Purpose = ""
    check_id: str | None = None
    """The cell of the check that shows whether this one trains as one device does."""

    @property
    def timed(self) -> bool:
        """Whether its steps are timed in windows."""
        return self.kind == "throughput" or self.purpose in ("twin", "explain")

    @property
    def id(self) -> str:
        repeat = f"s{self.seed}" if self.kind == "convergence" else f"b{self.block}"
        mark = {"twin": "t", "equivalence": "e", "doctor": "d"}.get(self.purpose, "")
        return f"{self.cell.id}-{repeat}{mark}"

    @property
    def label(self) -> str:
        repeat = f"seed {self.seed}" if self.kind == "convergence" else f"block {self.block}"
        return " · ".join(part for part in (self.cell.label, repeat, self.purpose) if part)


@dataclass(frozen=True)
class WorkerGroup:
    """Fresh processes that run the trials of one block that need the same placement."""

    id: str
    block: int
    placement: Placement
    device: str
    oversubscribe: bool
    trials: tuple[Trial, ...]
    launcher: str = "ray"

    @property
    def backend(self) -> str:
        """gloo for CPU slots and where ranks share a GPU, which NCCL refuses; else NCCL beside gloo for the control."""
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" and not self.oversubscribe else "gloo"

    def __str__(self) -> str:
        return str(self.placement) + (f" by {self.launcher}" if self.launcher != "ray" else "")


@dataclass(frozen=True)
class Skip:
    """A trial that will not be started, and why."""

    trial: Trial
    reason: str
