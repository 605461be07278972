"""The batches of a training over epochs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from harness.measure.convergence import EpochData
from harness.plan.cell import Cell
from harness.train import loader
from harness.train.loader import Share
from harness.train.ranks import Ranks

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "strong", 4, 4, loader={"workers": 1})
DATA = TensorDataset(torch.arange(12))


class PrefetchingLoader:
    """Stands for torch's DataLoader with workers: two batches of a pass are taken ahead."""

    made = 0

    def __init__(self, dataset: Any, *, batch_sampler: Any, **settings: Any) -> None:
        type(self).made += 1
        self.dataset, self.keys = dataset, batch_sampler

    def __iter__(self) -> Iterator[Any]:
        keys = iter(self.keys)
        ahead = deque(islice(keys, 2))
        while ahead:
            batch = self.dataset.__getitems__(ahead.popleft())
            ahead.extend(islice(keys, 1))
            yield batch


class Observed(EpochData):
    """Notes the epoch of each share that a loader takes."""

    taken: list[int]

    def shares(self, epoch: int) -> Iterator[Share]:
        for share in super().shares(epoch):
            self.taken.append(epoch)
            yield share


def test_no_batch_of_the_next_epoch_is_loaded_while_the_clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DataLoader", PrefetchingLoader)
    data = Observed(CELL, 0, ONE, DATA, DATA)
    object.__setattr__(data, "taken", [])
    for epoch in range(2):
        before = len(data.taken)
        source = data.training_batches(epoch)
        assert len(data.taken) == before
        for _ in range(data.steps):
            next(source)
        assert data.taken[before:] == [epoch] * data.steps  # the evaluation follows here
    assert PrefetchingLoader.made == 1, "the loader's worker processes live on"
