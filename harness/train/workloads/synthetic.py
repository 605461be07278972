"""Synthetic data: samples drawn from their own index when asked for, so that nothing is held in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.utils.data import Dataset

T = TypeVar("T", covariant=True)
Draw = Callable[[int, torch.Generator], T]
"""(index, generator seeded with it) -> sample. With worker processes that are not forked it must be picklable."""


class Synthetic(Dataset[T], Generic[T]):
    """The samples of a range of indices."""

    def __init__(self, draw: Draw[T], indices: range) -> None:
        self._draw, self._indices = draw, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> T:
        index = self._indices[place]
        return self._draw(index, torch.Generator().manual_seed(index))


def synthetic_datasets(draw: Draw[T], samples: int) -> tuple[Synthetic[T], Synthetic[T]]:
    """Return a training set, and a validation set of a tenth as many other samples."""
    held_out = max(1, samples // 10)
    return Synthetic(draw, range(samples)), Synthetic(draw, range(samples, samples + held_out))
