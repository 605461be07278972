"""Validation samples whose values are those of a training sample, in data sets that share no object."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from harness.train.digests import value_digest
from harness.train.loader import SeededDataset
from harness.train.workloads import SizedDataset

MOST = 256
"""Validation samples that are compared, spread over the set."""
SECONDS = 0.5
"""The time to read training samples; slower sets are compared in part, evenly spaced."""
FEW = 8
"""Copies below which chance may explain them."""
CHUNK = 32
"""Samples that are read at once."""
SHARE = 0.05
"""The part of the compared validation samples from which copies count."""
OWN_COPIES = 0.05
"""If a larger part of the training samples equals another one, equal samples are in the nature of the data."""


@dataclass(frozen=True)
class Copies:
    """Of ``compared`` validation samples, those with the values of one of the ``read`` training samples."""

    found: int = 0
    compared: int = 0
    read: int = 0

    @property
    def is_many(self) -> bool:
        """Whether the copies are more than chance explains."""
        return self.found >= max(FEW, SHARE * self.compared)


NO_COPIES = Copies()


def copies_by_value(train: SizedDataset, validation: SizedDataset, seed: int) -> Copies:
    """Compare samples bit for bit, with their labels; nothing if training samples equal each other too.

    Augmentation draws from each sample's index, so that of augmented samples no copy is found.
    """
    wanted = {value_digest(sample) for sample in _samples(validation, _spread(len(validation), MOST), seed)}
    end, seen, read = time.perf_counter() + SECONDS, set[str](), 0
    for sample in _samples(train, _in_passes(len(train)), seed):
        seen.add(value_digest(sample))
        read += 1
        if time.perf_counter() > end:
            break
    if len(seen) < (1 - OWN_COPIES) * read:
        return NO_COPIES
    return Copies(len(wanted & seen), len(wanted), read)


def _samples(dataset: SizedDataset, indices: Iterable[int], seed: int) -> Iterator[object]:
    seeded = SeededDataset(dataset, seed)
    waiting = iter(indices)
    while chunk := list(islice(waiting, CHUNK)):
        yield from seeded.__getitems__([(0, index) for index in chunk])


def _spread(size: int, most: int) -> list[int]:
    """Return at most ``most`` indices, evenly spaced."""
    return sorted({step * size // most for step in range(most)}) if size else []


def _in_passes(size: int) -> Iterator[int]:
    """Yield every index once; what is read first is spread over the whole set."""
    stride = max(1, size // MOST)
    for first in range(stride):
        yield from range(first, size, stride)
