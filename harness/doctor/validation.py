"""The validation set: not empty, and no part of the training set, by object or by value; its metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from harness.doctor.data import base_indices
from harness.doctor.real_steps import OtherRanksNeeded, group_of_one
from harness.doctor.subject import Case, Check, Subject, describe_error, first_found
from harness.measure.convergence import WholeSet, call_evaluate
from harness.measure.generators import drawing
from harness.plan.checks import Finding, join_names
from harness.plan.known_errors import remedy
from harness.plan.rows import Severity
from harness.train.loader import NoDigest, SeededDataset, value_digest
from harness.train.workloads import SizedDataset, collate_of, innermost

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
NAME = "validation set"
Sums = Mapping[str, tuple[float, ...]]
"""Sum and weight of each metric."""


@dataclass(frozen=True)
class Copies:
    """The number of ``compared`` validation samples that equal one of the ``read`` training samples."""

    found: int = 0
    compared: int = 0
    read: int = 0

    @property
    def is_many(self) -> bool:
        """Whether the copies are more than chance explains."""
        return self.found >= max(FEW, SHARE * self.compared)


def copies_by_value(train: SizedDataset, validation: SizedDataset, seed: int) -> Copies:
    """Compare samples bit for bit, with their labels; nothing if training samples equal each other too.

    Augmentation draws from each sample's index, so that of augmented samples no copy is found.
    """
    began, seen, read = time.perf_counter(), set[str](), 0
    compared = sorted({step * len(validation) // MOST for step in range(MOST)}) if len(validation) else []
    in_passes = (compared[place] for place in _in_passes(len(compared), PASSES))
    try:
        wanted = set(_digests(validation, in_passes, seed, began + SECONDS / 2))
        for digest in _digests(train, _in_passes(len(train), max(1, len(train) // MOST)), seed, began + SECONDS):
            seen.add(digest)
            read += 1
    except NoDigest:  # the check of the training samples says so
        return Copies()
    if len(seen) < (1 - OWN_COPIES) * read:
        return Copies()
    return Copies(len(wanted & seen), len(wanted), read)


def _digests(dataset: SizedDataset, indices: Iterable[int], seed: int, end: float) -> Iterator[str]:
    """Yield the digest of each sample; at least one, then until ``end``."""
    seeded, waiting, size = SeededDataset(dataset, seed), iter(indices), 1
    while chunk := list(islice(waiting, size)):
        yield from map(value_digest, seeded.__getitems__([(0, index) for index in chunk]))
        if time.perf_counter() > end:
            return
        size = min(CHUNK, 2 * size)


def _in_passes(size: int, passes: int) -> Iterator[int]:
    """Yield every index once; what is read first is spread over the whole set."""
    for first in range(passes):
        yield from range(first, size, passes)


def observe(subject: Subject) -> list[Finding]:
    """Compare both data sets; nothing if no cell is evaluated, so that the validation set does not matter."""
    if not subject.epochs:
        return []
    train, validation = subject.datasets
    if not len(validation):
        means, advice = "no epoch can be evaluated", "return a validation set with samples; check its split and filters"
        return [Finding(NAME, "error", "size of the validation set: 0 samples", means, advice, stops=True)]
    shared = ""
    if train is validation:
        shared = "the training set itself"
    elif number := _shared(train, validation):
        shared = f"{number:,} of its {len(validation):,} samples train too"
    elif subject.ranks.first:  # of the same sets on every rank, one look is enough
        copies = copies_by_value(train, validation, subject.seed)
        if copies.is_many:
            equal = f"{copies.found:,} of {copies.compared:,} compared samples equal one of"
            shared = f"{equal} {copies.read:,} training samples"
    if not shared:
        return []
    means = "validation metrics are those of training data: they do not show how well the model does on new data"
    advice = "split the data, as with torch.utils.data.random_split and a generator with a seed"
    severity: Severity = "note" if train is validation else "warning"
    return [Finding(NAME, severity, f"validation set: {shared}", means, advice)]


def _shared(train: object, validation: object) -> int:
    if isinstance(train, TensorDataset) and isinstance(validation, TensorDataset):
        return _shared_rows(train.tensors[0], validation.tensors[0])
    (base, own), (other_base, others) = base_indices(train), base_indices(validation)
    if base is not other_base or (own is None and others is None):
        return 0
    return len({*own} & {*others}) if own is not None and others is not None else len({*(own or others or ())})


def _shared_rows(train: Tensor, validation: Tensor) -> int:
    """Return how many rows of the second tensor are memory of the first too, as in overlapping slices of one tensor."""
    if train.untyped_storage().data_ptr() != validation.untyped_storage().data_ptr() or not validation.is_contiguous():
        return 0
    row = max(1, validation[0].numel()) if len(validation) else 1
    reach = sum((size - 1) * stride for size, stride in zip(train.shape, train.stride(), strict=True))
    start, end = train.storage_offset(), train.storage_offset() + (reach + 1 if train.numel() else 0)
    first, last = validation.storage_offset(), validation.storage_offset() + validation.numel()
    return int(max(0, min(end, last) - max(start, first)) // row)


CHECK = Check(observe, first_found, about=("datasets",))

METRICS = "metrics"
ADDITIVE, ROUNDINGS = 1e-3, 4
"""Largest relative difference of a metric of a batch from the metric of its halves together, or so many roundings."""
EVALUATED = 64
"""Most validation samples, spread over the set, that metrics() and evaluate() get."""


@dataclass(frozen=True)
class Metrics:
    """What metrics() and evaluate() return of a few samples by an untrained model.

    ``apart``: metrics that differ between the batch and its halves together, with both values. ``raised``: the error of
    evaluate(). ``values``: what it returned; None without one.
    """

    samples: int
    apart: dict[str, tuple[float, float]] = field(default_factory=dict)
    values: dict[str, float] | None = None
    raised: str = ""


def observe_metrics(subject: Subject) -> Metrics | None:
    """Compute the metrics of a batch and of its halves, and call evaluate(); None without them, or without epochs."""
    workload, validation = innermost(subject.workload), subject.datasets[1]
    metrics = getattr(workload, "metrics", None)
    if not (subject.epochs and len(validation) and (metrics or hasattr(workload, "evaluate"))):
        return None
    count = max(2, min(EVALUATED, subject.cell.global_batch_size // subject.cell.devices))  # as many as fit in training
    collate = collate_of(workload, training=False) or default_collate
    samples = [validation[step * len(validation) // count] for step in range(count)]
    with drawing() as collate_drew:
        parts = [subject.to_device(collate(part)) for part in (samples, samples[::2], samples[1::2])]
    found = Metrics(count)
    with group_of_one(subject.device), torch.no_grad():
        model = subject.bare_model().eval()
        if metrics:
            with drawing(model, workload) as drew:
                computed = [metrics(model, part) for part in parts]
            whole, *halves = ({name: tuple(map(float, pair)) for name, pair in each.items()} for each in computed)
            if not (drew() or collate_drew()):  # of other draws the values are others
                sums = [each for pair in computed[0].values() for each in pair if isinstance(each, Tensor)]
                rounding = max((torch.finfo(each.dtype).eps for each in sums if each.is_floating_point()), default=0.0)
                found = replace(found, apart=dict(_apart(whole, halves, max(ADDITIVE, ROUNDINGS * rounding))))
        if hasattr(workload, "evaluate"):
            try:
                found = replace(found, values=call_evaluate(workload, model, WholeSet(lambda: iter(parts[1:]), 2)))
            except (OtherRanksNeeded, torch.OutOfMemoryError):  # not alone, or not beside what the doctor holds
                pass
            except Exception as error:
                found = replace(found, raised=describe_error(error))
    return found


def _apart(whole: Sums, halves: Sequence[Sums], tolerance: float) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield each metric that differs between a batch and its halves together, with both values."""
    for name, (total, weight) in whole.items():
        sums = [sum(part[name][i] for part in halves if name in part) for i in (0, 1)]
        if weight and sums[1]:
            one, other = total / weight, sums[0] / sums[1]
            if abs(one - other) > tolerance * max(abs(one), abs(other)):
                yield name, (one, other)


def judge_metrics(seen: Sequence[Metrics | None], case: Case) -> Iterator[Finding]:
    first = seen[0]
    if first is None:
        return
    advice = "compute it in evaluate(model, loader), which gets the whole validation set in the same batches everywhere"
    if first.apart:
        name, (one, other) = next(iter(first.apart.items()))
        text = f"val_{name} of {first.samples} samples: {one:.4g} in one batch, {other:.4g} in two"
        others = f"; also {join_names([f'val_{each}' for each in first.apart][1:])}" if len(first.apart) > 1 else ""
        means = "no mean over samples: it depends on how the validation set is split, and so on the strategy"
        yield Finding(METRICS, "warning", text + others, means, advice)
    if first.raised:
        text = f"evaluate() of {first.samples} samples spread over the validation set: {first.raised}"
        means = "if it needs no more samples than these, each evaluation of an epoch fails"
        yield Finding(METRICS, "warning", text, means, remedy(first.raised) or "return {name: number} of any samples")
        return
    yield from _unlike([rank.evaluated for rank in case.steps])
    if unknown := [name for name, value in (first.values or {}).items() if not math.isfinite(value)]:
        text = f"what evaluate() returns of {first.samples} samples that is not finite: {join_names(unknown)}"
        means = "no target of it is reached, and no curve of it drawn, if it stays so on the whole set"
        yield Finding(METRICS, "note", text, means, "return a number also if a class is missing")


def _unlike(evaluated: Sequence[list[str] | str]) -> Iterator[Finding]:
    """Yield a finding if evaluate() raises on some ranks alone, or returns names that not all ranks return."""
    names = {rank: each for rank, each in enumerate(evaluated) if not isinstance(each, str)}
    if raised := {rank: each for rank, each in enumerate(evaluated) if isinstance(each, str)}:
        rank, error = next(iter(raised.items()))
        if names:
            text = f"ranks on which evaluate() raises: {len(raised)} of {len(evaluated)}; on rank {rank}: {error}"
            means = "each evaluation of an epoch fails; trials without epochs are measured"
            yield Finding(METRICS, "warning", text, means, "let evaluate() return the same names on every rank")
        return
    having = {name: [rank for rank in names if name in names[rank]] for name in sorted({*chain(*names.values())})}
    if unlike := [name for name, ranks in having.items() if len(ranks) < len(names)]:
        of_ranks = [f"{name} (rank {join_names([*map(str, having[name])])})" for name in unlike]
        text = f"names that evaluate() returns on some of {len(names)} ranks alone: {join_names(of_ranks)}"
        means = "those of rank 0 are recorded: each rank evaluates the whole set"
        yield Finding(METRICS, "warning", text, means, "return the same names on every rank")


METRICS_CHECK = Check(
    observe_metrics,
    judge_metrics,
    needs_steps=True,  # which show what evaluate() returns among other ranks
    needs_whole_model=True,
    about=("metrics", "evaluate"),
    clue=r"auroc|auc|f1|median",
)
