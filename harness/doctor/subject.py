"""What the doctor examines: one cell's workload on one rank, and the ways in which it is looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.plan.cell import Cell
from harness.plan.comparison import base_cell
from harness.train.loader import Share, batches, copier, endless_shares
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads import Workload

if TYPE_CHECKING:
    from harness.doctor.steps import Steps

SMALL = 4
"""Samples of a batch on which only the shape of things is looked at."""


def doctor_cell(cell: Cell) -> Cell:
    """The cell as it is looked at: a micro-batch a step, at the rate of the whole batch, not compiled."""
    parts = cell.micro_batches
    recipe = {name: value for name, value in cell.training.items() if name != "accumulation"}
    if base := cell.training.get("lr_base_batch_size"):
        recipe["lr_base_batch_size"] = base / parts
    share = cell.per_device_batch_size
    return replace(
        cell,
        compile=False,
        training=recipe,
        per_device_batch_size=share // parts if share else None,
        global_batch_size=cell.global_batch_size // parts,
    )


@dataclass(frozen=True)
class Subject:
    """``advance`` tells that something moves; the workload's data sets are read already."""

    cell: Cell
    workload: Workload
    datasets: Sequence[Any]
    seed: int
    ranks: Ranks
    advance: Callable[[], None] = lambda: None
    micro_batches: int = 1
    """How many of the cell's batches the training that it stands for takes before it steps."""
    epochs: bool = False
    """Whether the cell is trained for whole epochs too."""
    steps: Sequence[Steps] = ()
    """The real steps of every rank, once they are taken."""

    def fresh(self) -> Subject:
        """The same with a workload that holds nothing of what an earlier look left in it."""
        return replace(self, workload=copy.copy(self.workload))

    @property
    def device(self) -> torch.device:
        return self.ranks.devices[0]

    @property
    def training_samples(self) -> int:
        return len(self.datasets[0])

    @property
    def to_device(self) -> Callable[[object], object]:
        """Brings a batch to this rank's first device."""
        return copier(self.device, {})

    def bare_model(self) -> nn.Module:
        """The model as the workload builds it, from the seed, on the device, in no wrapper."""
        torch.manual_seed(self.seed)
        model: nn.Module = self.workload.build_model()
        return model.to(self.device)

    def training(self, workload: Workload | None = None) -> Training:
        """The cell's training as a trial makes it."""
        return Training(self.cell, workload or self.workload, self.seed, self.ranks)

    def single_device_training(self, workload: Workload | None = None) -> Training:
        """The same on one device, by this rank alone; at the rate that goes with the cell's own global batch."""
        cell = replace(base_cell(self.cell), global_batch_size=self.cell.global_batch_size)
        ranks = replace(self.ranks, rank=0, world_size=1, local_rank=0, node_rank=0, devices=self.ranks.devices[:1])
        return Training(cell, workload or self.workload, self.seed, ranks)

    def first_samples(self, count: int) -> object:
        """A batch of the first samples, on the device."""
        keys = tuple((0, index % self.training_samples) for index in range(count))
        return self.to_device(next(self._batches([Share(keys, count, count)])))

    def stream(self, steps: int, *, whole: bool = False) -> list[tuple[Share, object]]:
        """This rank's shares of the first steps and their batches on the device; ``whole``: the global batches."""
        rank, world_size = (0, 1) if whole else (self.ranks.rank, self.ranks.world_size)
        shares = endless_shares(self.training_samples, self.cell.global_batch_size, self.seed, rank, world_size)
        mine = list(islice(shares, steps))
        return [(share, self.to_device(batch)) for share, batch in zip(mine, self._batches(mine), strict=True)]

    @cached_property
    def replicas(self) -> int:
        """How many devices this rank drives."""
        return len(self.ranks.devices)

    def _batches(self, shares: Sequence[Share]) -> Iterator[object]:
        collate = getattr(self.workload, "collate", None)
        return batches(
            self.datasets[0], shares, seed=self.seed, device=self.device, options={"pin_memory": False}, collate=collate
        )
