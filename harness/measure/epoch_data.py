"""The data of a training over epochs on one rank, and its batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from harness.plan.cell import Cell, Options
from harness.plan.trial import SkipReason, SkipTrial
from harness.train.loader import Batches, Share, batches, epoch_shares, evaluation_shares
from harness.train.ranks import Ranks
from harness.train.transfer import copier
from harness.train.workloads import Collate, SizedDataset


class _Loading(TypedDict):
    """The loader's settings, the same for training and validation."""

    seed: int
    ranks: Ranks
    options: Options
    collate: Collate | None


@dataclass(frozen=True)
class EpochData:
    """The data of a training on one rank, and how its batches are drawn. Raises SkipTrial if there is too little."""

    cell: Cell
    seed: int
    ranks: Ranks
    train: SizedDataset
    validation: SizedDataset
    collate: Collate | None = None

    def __post_init__(self) -> None:
        if self.cell.global_batch_size > self.samples:
            reason = f"global batch {self.cell.global_batch_size} exceeds the {self.samples} training samples"
            raise SkipTrial(SkipReason("too_few_samples", reason))

    @property
    def samples(self) -> int:
        return len(self.train)

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(self.samples / self.cell.global_batch_size)

    def shares(self, epoch: int) -> Iterator[Share]:
        """Return the rank's shares of one epoch, counted from 0."""
        ranks = self.ranks
        return epoch_shares(self.samples, self.cell.global_batch_size, self.seed, epoch, ranks.rank, ranks.world_size)

    def training_batches(self, epoch: int) -> Iterator[object]:
        """Return the batches of one epoch, none of which is loaded before the first is asked for."""
        return self._training_loader.of(self.shares(epoch))

    def validation_batches(self) -> Iterator[tuple[Share, object]]:
        """Return the rank's shares of the validation set with their batches, each sample exactly once."""
        return self._once(self.validation)

    def training_batches_once(self) -> Iterator[tuple[Share, object]]:
        """Return the same of the training set, in its own order."""
        return self._once(self.train)

    def _once(self, dataset: SizedDataset) -> Iterator[tuple[Share, object]]:
        # a forward pass as large as in training: with accumulation there may be no room for more
        batch = max(1, self.cell.global_batch_size // self.cell.micro_batches)
        plan = (len(dataset), batch, self.ranks.rank, self.ranks.world_size)
        loaded = batches(dataset, evaluation_shares(*plan), **self._loading)
        return zip(evaluation_shares(*plan), loaded, strict=True)

    def copier(self) -> Callable[[object], object]:
        """Return a function that moves a batch to the rank's device."""
        return copier(self.ranks.devices[0], self.cell.loader)

    @cached_property
    def _training_loader(self) -> Batches:
        return Batches(self.train, **self._loading, micro_batches=self.cell.micro_batches)

    @property
    def _loading(self) -> _Loading:
        return {"seed": self.seed, "ranks": self.ranks, "options": self.cell.loader, "collate": self.collate}
