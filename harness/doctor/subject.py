"""The subject of the doctor: the workload of one cell on one rank, with models, batches and trainings of it."""

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
from harness.train.loader import Share, batches, endless_shares
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.transfer import copier
from harness.train.workloads import Workload

if TYPE_CHECKING:
    from harness.doctor.steps import Steps

SMALL = 4
"""Samples of a batch for checks that need only shapes."""


def doctor_cell(cell: Cell) -> Cell:
    """Return the cell that the doctor trains: not compiled, a micro-batch a step at the whole batch's learning rate."""
    parts = cell.micro_batches
    recipe = {name: value for name, value in cell.training.items() if name != "accumulation"}
    if isinstance(base := cell.training.get("lr_base_batch_size"), int | float):
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
    """One cell on one rank. ``advance`` resets the watchdog."""

    cell: Cell
    workload: Workload
    datasets: Sequence[Any]
    seed: int
    ranks: Ranks
    advance: Callable[[], None] = lambda: None
    micro_batches: int = 1
    """Micro-batches a step in the training that the cell stands for."""
    epochs: bool = False
    """The cell is trained for whole epochs too."""
    steps: Sequence[Steps] = ()
    """The real steps of every rank; empty before they are taken."""

    def fresh(self) -> Subject:
        """Return a copy with a copied workload, so that attributes set by one check do not reach the next."""
        return replace(self, workload=copy.copy(self.workload))

    @property
    def device(self) -> torch.device:
        return self.ranks.devices[0]

    @property
    def training_samples(self) -> int:
        return len(self.datasets[0])

    @property
    def to_device(self) -> Callable[[object], object]:
        """A function that moves a batch to this rank's first device."""
        return copier(self.device, {})

    def bare_model(self) -> nn.Module:
        """Build the workload's model from the seed, on the device, without a wrapper."""
        torch.manual_seed(self.seed)
        model: nn.Module = self.workload.build_model()
        return model.to(self.device)

    def training(self, workload: Workload | None = None) -> Training:
        """Make the training of the cell, as a trial does."""
        return Training(self.cell, workload or self.workload, self.seed, self.ranks)

    def single_device_training(self, workload: Workload | None = None) -> Training:
        """Make the training of one device, on this rank only; at the learning rate of the cell's global batch."""
        cell = replace(base_cell(self.cell), global_batch_size=self.cell.global_batch_size)
        ranks = replace(self.ranks, rank=0, world_size=1, local_rank=0, node_rank=0, devices=self.ranks.devices[:1])
        return Training(cell, workload or self.workload, self.seed, ranks)

    def first_samples(self, count: int) -> object:
        """Return a batch of the first samples, on the device."""
        keys = tuple((0, index % self.training_samples) for index in range(count))
        return self.to_device(next(self._batches([Share(keys, count, count)])))

    def stream(self, steps: int, *, whole: bool = False) -> list[tuple[Share, object]]:
        """Return this rank's shares of the first steps with their batches; ``whole``: the global batches instead."""
        rank, world_size = (0, 1) if whole else (self.ranks.rank, self.ranks.world_size)
        shares = endless_shares(self.training_samples, self.cell.global_batch_size, self.seed, rank, world_size)
        first = list(islice(shares, steps))
        return [(share, self.to_device(batch)) for share, batch in zip(first, self._batches(first), strict=True)]

    @cached_property
    def replicas(self) -> int:
        """The number of devices of this rank."""
        return len(self.ranks.devices)

    def _batches(self, shares: Sequence[Share]) -> Iterator[object]:
        collate = getattr(self.workload, "collate", None)
        return batches(
            self.datasets[0], shares, seed=self.seed, ranks=self.ranks, options={"pin_memory": False}, collate=collate
        )
