"""The distinct samples of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from harness.doctor.data import Samples, distinct, drawn_samples
from harness.doctor.subject import Subject
from harness.train.ranks import Ranks
from tests.doctor.healthy import Healthy
from tests.doctor.ranks import cell_for

DATA = TensorDataset(torch.arange(100.0))


def drawn(train: Any, rank: int, world_size: int) -> frozenset[int] | None:
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    return drawn_samples(Subject(cell_for("ddp", world_size, 10), Healthy(), (train, DATA), 0, ranks))


@pytest.mark.parametrize(
    ("trains", "number"),
    [
        ((DATA,), 100),
        ((DATA, DATA), 100),
        ((DATA, TensorDataset(torch.arange(50.0))), None),
        ((Subset(DATA, range(40)),) * 2, 40),
        ((Subset(DATA, [3] * 40),) * 2, 1),
        ((Subset(Subset(DATA, range(0, 100, 2)), range(20)), Subset(DATA, range(0, 40, 2))), 20),
        ((Subset(DATA, range(0, 100, 2)), Subset(DATA, range(1, 100, 2))), 50),
    ],
    ids=["one device", "two ranks", "sizes differ", "a part", "one sample", "nested", "sharded again"],
)
def test_samples_count_once(trains: tuple[Any, ...], number: int | None) -> None:
    seen = [Samples(len(train), [], [], [], drawn=drawn(train, rank, len(trains))) for rank, train in enumerate(trains)]
    assert distinct(seen) == number
