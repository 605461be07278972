"""The validation set: not empty, and no part of the training set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from harness.doctor.check import Case, Check
from harness.doctor.shared_values import NO_COPIES, Copies, copies_by_value
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding

NAME = "validation set"


@dataclass(frozen=True)
class Validation:
    """The size of the validation set, and what it shares with the training set."""

    count: int
    same: bool = False
    """It is the training set itself."""
    shared: int = 0
    """Samples that are in both: known of Subsets of one data set, and of slices of one tensor."""
    copies: Copies = NO_COPIES
    """Samples with the values of training samples, if both sets share nothing that is known."""


def observe(subject: Subject) -> Validation | None:
    """Compare both data sets; None if no cell is evaluated, so that the validation set does not matter."""
    if not subject.epochs:
        return None
    train, validation = subject.datasets[0], subject.datasets[1]
    found = Validation(len(validation), train is validation, _shared(train, validation))
    if found.same or found.shared or subject.ranks.rank:  # of the same sets on every rank, one look is enough
        return found
    return replace(found, copies=copies_by_value(train, validation, subject.seed))


def _shared(train: object, validation: object) -> int:
    if isinstance(train, TensorDataset) and isinstance(validation, TensorDataset):
        return _shared_rows(train.tensors[0], validation.tensors[0])
    base, own = _indices(train)
    other_base, others = _indices(validation)
    if base is not other_base or (own is None and others is None):
        return 0
    if own is None or others is None:
        return len(own or others or ())
    return len(own & others)


def _shared_rows(train: Tensor, validation: Tensor) -> int:
    """Return how many rows of the second tensor are memory of the first too, as in overlapping slices of one tensor."""
    if train.untyped_storage().data_ptr() != validation.untyped_storage().data_ptr() or not validation.is_contiguous():
        return 0
    row = max(1, validation[0].numel()) if len(validation) else 1
    start, end = train.storage_offset(), train.storage_offset() + train.numel()
    first, last = validation.storage_offset(), validation.storage_offset() + validation.numel()
    return int(max(0, min(end, last) - max(start, first)) // row)


def _indices(dataset: object) -> tuple[object, set[int] | None]:
    """Return the data set that a Subset is of, with its indices; any other set itself, without indices."""
    if isinstance(dataset, Subset):
        return dataset.dataset, {int(index) for index in dataset.indices}
    return dataset, None


def _shared_words(seen: Validation) -> str:
    """Return what validation and training share, empty if nothing that is known."""
    copies = seen.copies
    if seen.same:
        return "the training set itself"
    if seen.shared:
        return f"{seen.shared:,} of its {seen.count:,} samples train too"
    if copies.is_many:
        return f"{copies.found:,} of {copies.compared:,} compared samples equal one of {copies.read:,} training samples"
    return ""


def judge(seen: Sequence[Validation | None], case: Case) -> list[Finding]:
    first = seen[0]
    if first is None:
        return []
    if not first.count:
        means, advice = "no epoch can be evaluated", "return a validation set with samples; check its split and filters"
        return [Finding(NAME, "error", "size of the validation set: 0 samples", means, advice, stops=True)]
    shared = _shared_words(first)
    if not shared:
        return []
    return [
        Finding(
            NAME,
            "note" if first.same else "warning",
            f"validation set: {shared}",
            "validation metrics are those of training data: they do not show how well the model does on new data",
            "split the data, as with torch.utils.data.random_split and a generator with a seed",
        )
    ]


CHECK = Check(NAME, observe, judge, about=("datasets",))
