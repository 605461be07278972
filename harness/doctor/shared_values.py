"""Validation samples whose values are those of a training sample, in data sets that share no object."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from harness.train.digests import NoDigest, value_digest
from harness.train.loader import SeededDataset
from harness.train.workloads import SizedDataset

MOST = 256
"""Validation samples that are compared, spread over the set."""
SECONDS = 0.5
"""The time to read samples, at most half of it for validation; slower sets are compared in part, evenly spaced."""
FEW = 8
"""Copies below which chance may explain them."""
CHUNK = 32
"""Samples that are read at once, at most: the first ones show how long they take."""
PASSES = 16
"""Each reads validation samples that are spread over the set."""
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
    began, seen, read = time.perf_counter(), set[str](), 0
    compared = _spread(len(validation), MOST)
    in_passes = (compared[place] for place in _in_passes(len(compared), PASSES))
    try:
        wanted = set(_digests(validation, in_passes, seed, began + SECONDS / 2))
        for digest in _digests(train, _in_passes(len(train), max(1, len(train) // MOST)), seed, began + SECONDS):
            seen.add(digest)
            read += 1
    except NoDigest:  # the check of the training samples says so
        return NO_COPIES
    if len(seen) < (1 - OWN_COPIES) * read:
        return NO_COPIES
    return Copies(len(wanted & seen), len(wanted), read)


def _digests(dataset: SizedDataset, indices: Iterable[int], seed: int, end: float) -> Iterator[str]:
    """Yield the digest of each sample; at least one, then until ``end``."""
    seeded, waiting, size = SeededDataset(dataset, seed), iter(indices), 1
    while chunk := list(islice(waiting, size)):
        yield from map(value_digest, seeded.__getitems__([(0, index) for index in chunk]))
        if time.perf_counter() > end:
            return
        size = min(CHUNK, 2 * size)


def _spread(size: int, most: int) -> list[int]:
    """Return at most ``most`` indices, evenly spaced."""
    return sorted({step * size // most for step in range(most)}) if size else []


def _in_passes(size: int, passes: int) -> Iterator[int]:
    """Yield every index once; what is read first is spread over the whole set."""
    for first in range(passes):
        yield from range(first, size, passes)
