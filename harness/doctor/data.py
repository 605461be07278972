"""Data is shared out: every rank has the same data set, each index its own sample, and nothing shards it twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import DistributedSampler

from harness.doctor.check import Case, Check
from harness.doctor.digest import digest_of
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding
from harness.train.loader import SeededDataset

NAME = "data is shared out"
PROBES = 64
"""Samples that are compared, spread over the data set."""
DEPTH = 4
"""Levels of attributes that are searched for a sampler."""


@dataclass(frozen=True)
class Sampler:
    """A DistributedSampler inside a data set."""

    replicas: int
    rank: int
    holds: int
    """Samples of the data set that it draws from."""
    gives: int
    """Samples that it gives this rank."""


@dataclass(frozen=True)
class Samples:
    """The training set as one rank reads it."""

    count: int
    first: list[str]
    """Digests of PROBES samples."""
    again: list[str]
    """Digests of the same samples, read a second time."""
    samplers: list[Sampler]


def observe(subject: Subject) -> Samples:
    """Read the same samples twice, and search the data set for samplers."""
    train = subject.datasets[0]
    size = len(train)
    indices = sorted({step * size // PROBES for step in range(PROBES)})
    seeded = SeededDataset(train, subject.seed)
    first, again = ([digest_of(s) for s in seeded.__getitems__([(0, index) for index in indices])] for _ in range(2))
    samplers = [
        Sampler(found.num_replicas, found.rank, len(found.dataset), len(found))  # type: ignore[arg-type]
        for found in _samplers(train, DEPTH)
    ]
    return Samples(size, first, again, samplers)


def judge(seen: Sequence[Samples], case: Case) -> list[Finding]:
    # the first finding explains those that would follow
    for look in (lambda s: _sampler(s, case.cell), _unstable, _differing, _repeated):
        if found := list(look(seen)):
            return found
    return []


def _sampler(seen: Sequence[Samples], cell: Cell) -> Iterator[Finding]:
    for sampler in seen[0].samplers[:1]:
        given, holds = seen[0].count, sampler.holds
        yield Finding(
            NAME,
            "error",
            f"a DistributedSampler inside the data set (rank {sampler.rank} of {sampler.replicas}) gives "
            f"{sampler.gives:,} of {holds:,} samples; the data set has a length of {given:,}, under {cell.strategy}",
            f"{max(0, holds - given):,} samples are never seen, and their order never changes: nobody calls set_epoch",
            "give the whole data set: each rank gets its part of every global batch here, in a new order each epoch",
        )


def _differing(seen: Sequence[Samples]) -> Iterator[Finding]:
    lengths = [rank.count for rank in seen]
    advice = "datasets() must give every rank the same data: no rank, time or unseeded randomness in it"
    if len(set(lengths)) > 1:
        yield Finding(
            NAME,
            "error",
            f"the training set has {', '.join(f'{n:,}' for n in lengths)} samples on ranks 0 to {len(seen) - 1}",
            "ranks share out different data: samples are missed or seen twice",
            advice,
        )
    elif len(seen) > 1 and any(rank.first != seen[0].first for rank in seen):
        other = next(n for n, rank in enumerate(seen) if rank.first != seen[0].first)
        differ = sum(a != b for a, b in zip(seen[0].first, seen[other].first, strict=True))
        yield Finding(
            NAME,
            "error",
            f"{differ} of {len(seen[0].first)} samples, by index, are not the same on ranks 0 and {other}",
            "each rank reads its own data: what one global batch holds depends on the number of ranks",
            advice,
        )


def _unstable(seen: Sequence[Samples]) -> Iterator[Finding]:
    for rank in seen:
        differ = sum(a != b for a, b in zip(rank.first, rank.again, strict=True))
        if differ:
            yield Finding(
                NAME,
                "error",
                f"{differ} of {len(rank.first)} samples change when read again: same index, epoch and seed",
                "a rank does not train on the samples of its share: some are seen twice, some never",
                "a sample must depend on its index, and its randomness on torch's or Python's generator, which are "
                "seeded for it",
            )
            return


def _repeated(seen: Sequence[Samples]) -> Iterator[Finding]:
    probes = len(seen[0].first)
    distinct = len(set(seen[0].first))
    if probes >= 8 and distinct <= probes // 4:
        yield Finding(
            NAME,
            "warning",
            f"{probes} indices over the data set give {distinct} different sample(s)",
            "samples are seen many times an epoch while others may be missed",
            "let __getitem__ use its index",
        )


def _samplers(thing: object, depth: int, seen: set[int] | None = None) -> Iterator[DistributedSampler[object]]:
    """Yield the samplers in an object's attributes and items, ``depth`` levels deep."""
    seen = set() if seen is None else seen
    if depth < 0 or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, DistributedSampler):
        yield thing
        return
    inner = vars(thing).values() if hasattr(thing, "__dict__") and not isinstance(thing, type) else ()
    items = thing if isinstance(thing, list | tuple) and len(thing) <= 16 else ()
    for value in [*inner, *items]:
        if not isinstance(value, Tensor | str | bytes | int | float):
            yield from _samplers(value, depth - 1, seen)


CHECK = Check(NAME, observe, judge)
