"""The subject of the doctor: the workload of one cell on one rank, with models, batches and trainings of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from harness.doctor.builds import FewBuilds
from harness.doctor.process import ProcessState
from harness.plan.cell import Cell
from harness.plan.checks.memory import at_smaller_batch
from harness.plan.comparison import base_cell
from harness.plan.memory_rows import MemoryFacts
from harness.train.loader import Share, batches, endless_shares
from harness.train.loss_value import as_loss
from harness.train.model import init_weights_of, on_host
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.transfer import copier
from harness.train.workloads import Collate, Datasets, Workload

if TYPE_CHECKING:
    from harness.doctor.steps import Steps

SMALL = 4
"""Samples of a batch for checks that need only shapes."""


def doctor_cell(cell: Cell) -> Cell:
    """Return the cell that the doctor trains: not compiled, a micro-batch a step at the whole batch's learning rate."""
    recipe = {name: value for name, value in cell.training.items() if name != "accumulation"}
    return at_smaller_batch(replace(cell, compile=False, training=recipe), cell.micro_batches)


@dataclass(frozen=True)
class Subject:
    """One cell on one rank. ``advance`` resets the watchdog."""

    cell: Cell
    workload: Workload
    datasets: Datasets
    seed: int
    ranks: Ranks
    advance: Callable[[], None] = lambda: None
    planned: Cell | None = None
    """The planned cell, if it differs from the examined one."""
    modes: Sequence[tuple[str, bool]] = ()
    """Precision, and whether compiled, of the cells whose memory is estimated; empty: that of the cell."""
    memory: MemoryFacts | None = None
    """Sizes of the model; None if it cannot be built."""
    whole_model_fits: bool = True
    """One device has the memory to train the whole model."""
    epochs: bool = False
    """The cell is trained for whole epochs too."""
    process: ProcessState | None = None
    """The threads and processes before the examination."""
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

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step in the training that the cell stands for."""
        return self.planned.micro_batches if self.planned else 1

    def built_model(self) -> nn.Module:
        """Build the workload's model from the seed, on the host or on the meta device, as the workload does."""
        torch.manual_seed(self.seed)
        model: nn.Module = self.workload.build_model()
        return model

    def bare_model(self) -> nn.Module:
        """Build the workload's model from the seed, on the device, without a wrapper."""
        return self.on_device(self.built_model())

    def loss(self, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
        """Return the sum and weight of the workload's loss; raise WorkloadError if it returns anything else."""
        return as_loss(self.workload.loss(model, batch))

    def on_device(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; one that is built on the meta device is initialised first, on the host."""
        return on_host(model, init_weights_of(self.workload)).to(self.device)

    def training(self, workload: Workload | None = None) -> Training:
        """Make the training of the cell, as a trial does: without ``workload``, of a model that is built for it."""
        own = self.workload.inner if isinstance(self.workload, FewBuilds) else self.workload
        return Training(self.cell, workload or own, self.seed, self.ranks)

    def single_device_training(self, workload: Workload | None = None) -> Training:
        """Make the training of one device, on this rank only; at the learning rate of the cell's global batch."""
        cell = replace(base_cell(self.cell), global_batch_size=self.cell.global_batch_size)
        ranks = replace(self.ranks, rank=0, world_size=1, local_rank=0, node_rank=0, devices=self.ranks.devices[:1])
        return Training(cell, workload or self.workload, self.seed, ranks)

    def first_samples(self, count: int, device: torch.device | None = None) -> object:
        """Return a batch of the first samples, on the rank's device or on another one."""
        keys = tuple((0, index % self.training_samples) for index in range(count))
        return copier(device or self.device, {})(next(self._batches([Share(keys, count, count)])))

    def stream(self, steps: int, *, whole: bool = False, collate: Collate | None = None) -> list[tuple[Share, object]]:
        """Return this rank's shares of the first steps with their batches; ``whole``: the global batches instead.

        ``collate``: instead of the workload's own.
        """
        rank, world_size = (0, 1) if whole else (self.ranks.rank, self.ranks.world_size)
        shares = endless_shares(self.training_samples, self.cell.global_batch_size, self.seed, rank, world_size)
        first = list(islice(shares, steps))
        return [
            (share, self.to_device(batch)) for share, batch in zip(first, self._batches(first, collate), strict=True)
        ]

    @cached_property
    def replicas(self) -> int:
        """The number of devices of this rank."""
        return len(self.ranks.devices)

    def _batches(self, shares: Sequence[Share], collate: Collate | None = None) -> Iterator[object]:
        collate = collate or getattr(self.workload, "collate", None)
        return batches(
            self.datasets[0], shares, seed=self.seed, ranks=self.ranks, options={"pin_memory": False}, collate=collate
        )
