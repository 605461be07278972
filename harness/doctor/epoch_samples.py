"""The distinct samples that the ranks read together in one epoch, to be compared with those of one device."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import Subset

from harness.doctor.subject import Subject
from harness.train.loader import epoch_shares
from harness.train.workloads import SizedDataset

MOST = 200_000
"""Samples of a Subset whose indices the ranks send each other."""


def drawn_samples(subject: Subject) -> frozenset[int] | None:
    """Return the samples that this rank reads in the first epoch, by their index in the data set that Subsets are of.

    None if the training set is no Subset, or of more than MOST samples.
    """
    indices = _base_indices(subject.datasets[0])
    if indices is None or len(indices) > MOST:
        return None
    place = (subject.ranks.rank, subject.ranks.world_size)
    shares = epoch_shares(len(indices), subject.cell.global_batch_size, subject.seed, 0, *place)
    return frozenset(indices[index] for share in shares for _, index in share.keys)


def _base_indices(dataset: SizedDataset) -> Sequence[int] | None:
    """Return the indices of a Subset, of a Subset of a Subset those in the innermost data set; None of other sets."""
    if not isinstance(dataset, Subset):
        return None
    inner = _base_indices(dataset.dataset)  # type: ignore[arg-type]
    return [int(index) if inner is None else inner[index] for index in dataset.indices]


def distinct_samples(drawn: Sequence[frozenset[int] | None], sizes: Sequence[int]) -> int | None:
    """Return the number of distinct samples of an epoch from those that each rank reads, and the sizes of their sets.

    Of other sets than Subsets every index counts as a sample, if the sets are of equal size; else None.
    """
    known = [of_rank for of_rank in drawn if of_rank is not None]
    if len(known) == len(drawn):
        return len(frozenset[int]().union(*known))
    return sizes[0] if len(set(sizes)) == 1 else None
