"""Data: the same samples on every rank and no second sharding; the division of batches among devices; padding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from harness.doctor.facts import Steps
from harness.doctor.subject import Case, Check, Subject
from harness.measure.generators import UNKNOWN, State, generators_of, parts_of
from harness.plan import checks
from harness.plan.cell import Cell
from harness.plan.checks import Finding
from harness.plan.known_errors import remedy
from harness.plan.rows import Severity
from harness.train.loader import (
    Key,
    NoDigest,
    SeededDataset,
    end_with_trainer,
    epoch_shares,
    value_digest,
    workers_of,
)
from harness.train.workloads import SizedDataset

MOST = 200_000
"""Samples of a Subset whose indices the ranks send each other."""
NAME = "data sharding"
MOST_RANKS = 16
"""Ranks of a sampler whose draws are compared with a Subset's."""
PROBES = 64
"""Samples that are compared, spread over the data set."""
CACHED, LEAST_S = 3.0, 0.01
"""Samples are cached if their first reading takes this many times as long as their second, and as many seconds more."""
BY_WORKERS, MOST_S = 1000, 1.0
"""Most samples that are compared with those of loader workers, and the seconds after which no more are read."""
AT_ONCE = 8
"""Samples of a batch of this comparison: workers take turns often."""
PADDING = "padding"
LEAST_REAL = 0.3
"""With a smaller share of real values, most of the step computes on padding."""


def drawn_samples(subject: Subject) -> frozenset[int] | None:
    """Return the samples that this rank reads in the first epoch, by their index in the data set that Subsets are of.

    None if the training set is no Subset, or of more than MOST samples.
    """
    _, indices = base_indices(subject.datasets[0])
    if indices is None or len(indices) > MOST:
        return None
    place = (subject.ranks.rank, subject.ranks.world_size)
    shares = epoch_shares(len(indices), subject.cell.global_batch_size, subject.seed, 0, *place)
    return frozenset(indices[index] for share in shares for _, index in share.keys)


def base_indices(dataset: object) -> tuple[object, Sequence[int] | None]:
    """Return the innermost data set of a Subset, and its indices there; any other set itself, without indices."""
    if not isinstance(dataset, Subset):
        return dataset, None
    base, inner = base_indices(dataset.dataset)
    return base, [int(index) if inner is None else inner[index] for index in dataset.indices]


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
    repeats_draws: bool = False
    """Every sample sets a generator to the same state."""
    drawn: frozenset[int] | None = None
    """See ``drawn_samples``."""
    unknown: str = ""
    """Why samples have no digests."""
    read_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of the first and the second reading of these samples, if both show that they are cached."""


def observe(subject: Subject) -> Samples:
    """Read the same samples twice, and search the data set for samplers."""
    train = subject.datasets[0]
    size = len(train)
    indices = sorted({step * size // PROBES for step in range(PROBES)})
    seeded, keys, unknown = SeededDataset(train, subject.seed), [(0, index) for index in indices], ""
    seeded.__getitems__(keys[:1])  # opens files
    first, again, read_s = list[str](), list[str](), list[float]()
    for digests in (first, again):  # digested before the second reading, which may change what the first has returned
        samples, seconds = _timed(seeded, keys)
        read_s.append(seconds)
        try:
            digests += map(value_digest, samples)
        except NoDigest as error:
            unknown = str(error)
    if unknown:
        first, again = [], []
    cached = subject.cell.data != "synthetic_device" and _is_cached(*read_s)
    if cached:  # other load may have delayed the first reading: of the samples beside these too
        half = max(1, size // PROBES // 2)  # what is read with a sample's neighbours is cached with it
        beside = [(0, index + half) for index in indices if index + half not in indices][:-1]
        cached = bool(beside) and _is_cached(*(_timed(seeded, beside)[1] for _ in range(2)))
    samplers = [
        Sampler(found.num_replicas, found.rank, len(found.dataset), len(found))  # type: ignore[arg-type]
        for _, found in parts_of({"": train})
        if isinstance(found, DistributedSampler)
    ]
    samplers += _drawn_by_a_sampler(train)
    shown = (read_s[0], read_s[1]) if cached else (0.0, 0.0)
    return Samples(size, first, again, samplers, repeats_draws(train), drawn_samples(subject), unknown, shown)


def _timed(seeded: SeededDataset, keys: Sequence[Key]) -> tuple[list[object], float]:
    """Return samples, and the seconds of their reading: their number times the median, which no other load delays."""
    samples, seconds = list[object](), list[float]()
    for key in keys:
        start = time.perf_counter()
        samples += seeded.__getitems__([key])
        seconds.append(time.perf_counter() - start)
    return samples, len(keys) * median(seconds)


def _is_cached(first_s: float, again_s: float) -> bool:
    return first_s > max(CACHED * again_s, again_s + LEAST_S)


def judge(seen: Sequence[Samples], case: Case) -> Iterator[Finding]:
    # the first finding explains those that would follow
    yield from islice(chain(_sampler(seen, case.cell), _unstable(seen), _differing(seen), _repeated(seen)), 1)
    first, again = (1000 * seconds for seconds in max((rank.read_s for rank in seen), key=lambda read_s: read_s[0]))
    if first:
        text = f"reading {PROBES} samples for the first time: {first:.3g} ms, again: {again:.3g} ms"
        means = "cached samples, by the data set or the operating system: timed windows read most for the first time. "
        means += "If all fit into memory, later epochs are faster, and their speedups are others"
        advice = "fill the cache before the measurement, or decide by the time to a target (convergence)"
        yield Finding(NAME, "note", text, means, advice)
    if seen[0].repeats_draws:
        text = "state of the random generators after two different samples, from different states before: the same"
        means = "each sample sets a generator to one seed: augmentation and noise are the same for all samples, and "
        means += "for every step"
        advice = "remove the seed from __getitem__; the harness seeds each sample by seed, epoch and index"
        yield Finding(NAME, "warning", text, means, advice)


def distinct(seen: Sequence[Samples]) -> int | None:
    """Return the number of distinct samples in an epoch of all ranks; None if it is not known.

    Of other sets than Subsets every index counts as a sample, if the sets are of equal size.
    """
    known = [rank.drawn for rank in seen if rank.drawn is not None]
    if len(known) == len(seen):
        return len(frozenset[int]().union(*known))
    return seen[0].count if len({rank.count for rank in seen}) == 1 else None


def empty(samples: int) -> list[Finding]:
    """Return a finding if there is no training sample: no other check has anything to look at."""
    if samples:
        return []
    text, means = "size of the training set: 0 samples", "no step can be taken"
    advice = "return a training set with samples from datasets(); check its path, split and filters"
    return [Finding(NAME, "error", text, means, advice, stops=True)]


def _sampler(seen: Sequence[Samples], cell: Cell) -> Iterator[Finding]:
    for sampler in seen[0].samplers[:1]:
        given, holds = seen[0].count, sampler.holds
        text = f"DistributedSampler inside the data set (rank {sampler.rank} of {sampler.replicas}): {sampler.gives:,} "
        text += f"of {holds:,} samples; length of the data set under {cell.strategy}: {given:,}"
        means = f"{max(0, holds - given):,} samples are never used, and the order is the same in every epoch, as "
        means += "set_epoch is never called"
        advice = "return the whole data set from datasets(); the harness gives each rank its share of every global "
        yield Finding(NAME, "error", text, means, f"{advice}batch, in a new order each epoch")


def _differing(seen: Sequence[Samples]) -> Iterator[Finding]:
    lengths = [rank.count for rank in seen]
    advice = "datasets() must return the same data on every rank: no use of the rank, the time or unseeded randomness"
    if len(set(lengths)) > 1:
        text = f"size of the training set: {', '.join(f'{n:,}' for n in lengths)} samples on ranks 0 to {len(seen) - 1}"
        means = "shards of different data sets: some samples are never used, others twice an epoch"
        yield Finding(NAME, "error", text, means, advice, stops=True)
    elif len(seen) > 1 and any(rank.first != seen[0].first for rank in seen):
        other = next(n for n, rank in enumerate(seen) if rank.first != seen[0].first)
        differ = sum(a != b for a, b in zip(seen[0].first, seen[other].first, strict=True))
        number = distinct(seen)
        text = f"{differ} of {len(seen[0].first)} compared samples differ between ranks 0 and {other} at the same index"
        if number is not None and seen[0].drawn is not None:
            text += f"; distinct samples in an epoch: {number:,}"
        means = "different data on each rank: the contents of a global batch depend on the number of ranks"
        yield Finding(NAME, "error", text, means, advice)


def _unstable(seen: Sequence[Samples]) -> Iterator[Finding]:
    for rank in seen:
        differ = sum(a != b for a, b in zip(rank.first, rank.again, strict=True))
        if differ:
            text = f"{differ} of {len(rank.first)} compared samples change when they are read again at the same index, "
            means = "samples that depend on state or on an unseeded generator: the strategies train on different data, "
            means += "and loader workers or ranks may repeat draws"
            advice = "let a sample depend on its index only, and draw random numbers from torch's or Python's default "
            advice += "generator, which the harness seeds for each sample"
            yield Finding(NAME, "error", f"{text}epoch and seed", means, advice)


def _repeated(seen: Sequence[Samples]) -> Iterator[Finding]:
    probes, distinct = len(seen[0].first), len(set(seen[0].first))
    if probes >= 8 and distinct <= probes // 4:
        text = f"distinct samples at {probes} indices spread over the data set: {distinct}"
        means = "repeated samples in every epoch, while others may never be used"
        yield Finding(NAME, "warning", text, means, "use the index in __getitem__")


def repeats_draws(train: SizedDataset) -> bool:
    """Return whether reading a sample sets a generator to a state that depends on nothing, and put all back.

    Generators of the process and of the data set; those of other devices, which torch.manual_seed would seed, stay.
    """
    states = {name: State(generator) for name, generator in generators_of(train).items()}
    after = []
    for draws, index in enumerate((0, len(train) - 1), 1):
        for state in states.values():
            state.advance(draws)
        train[index]
        after.append({name: State(generator).digest for name, generator in generators_of(train).items()})
    for state in states.values():
        if state.digest != UNKNOWN:
            state.put_back()
    first, last = after
    return len(train) > 1 and any(digest == last.get(name) != UNKNOWN for name, digest in first.items())


def _drawn_by_a_sampler(train: object) -> list[Sampler]:
    """Return the sampler whose draw the indices of a Subset are, found by drawing again with its default seed."""
    if not isinstance(train, Subset):
        return []
    indices, holds = list(train.indices), len(train.dataset)  # type: ignore[arg-type]
    replicas = {round(holds / max(1, len(indices))), -(-holds // max(1, len(indices)))} - {0, 1}
    for number in replicas:
        for rank in range(min(number, MOST_RANKS)):
            sampler = DistributedSampler[int](range(holds), number, rank)  # type: ignore[arg-type]
            if len(sampler) == len(indices) and list(sampler) == indices:
                return [Sampler(number, rank, holds, len(indices))]
    return []


CHECK = Check(
    observe,
    judge,
    figures=lambda seen, case: {"comparison of samples": f"unknown: {seen[0].unknown}"} if seen[0].unknown else {},
    facts=lambda seen, case: {} if (number := distinct(seen)) is None else {"distinct_samples": number},
    about=("datasets",),
    clue=r"DistributedSampler|get_rank|get_world_size|seed\(",
)


NO_WORKERS = "trials read their data without workers, which the file leaves open"


@dataclass(frozen=True)
class ByWorkers:
    """Samples that loader workers read differently from the process itself, of those compared; or why they failed.

    ``needed``: whether the trials have workers in any case; else the file leaves their number open.
    """

    differ: int = 0
    compared: int = 0
    failed: str = ""
    needed: bool = True


class _Digests(Dataset[object]):
    """The digests of samples, made where they are read, by one thread: more add numbers in another order."""

    def __init__(self, seeded: SeededDataset) -> None:
        self.seeded = seeded

    def __getitems__(self, keys: list[Key]) -> list[str]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [value_digest(sample) for sample in self.seeded.__getitems__(keys)]
        finally:
            torch.set_num_threads(threads)


def observe_workers(subject: Subject) -> ByWorkers:
    """Read samples through loader workers and then in this process, if the cell has workers or may get them.

    First of all checks: what this process opens before is not open when a trial's workers are forked.
    """
    train = subject.datasets[0]
    workers = workers_of(subject.cell.loader, subject.device.type, train)
    needed = bool(workers) or subject.cell.loader.get("workers", 0) is not None
    if (needed and not workers) or subject.cell.data == "synthetic_device":
        return ByWorkers()
    size, digests = len(train), _Digests(SeededDataset(train, subject.seed))
    count = min(BY_WORKERS, size)
    keys = [(0, step * size // count) for step in range(count)]
    batches = [keys[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]
    loader = DataLoader(
        digests,
        batch_sampler=batches,
        num_workers=max(2, workers),
        collate_fn=list,
        generator=torch.Generator(),  # else it draws from the default one
        worker_init_fn=end_with_trainer,
    )
    read: list[str] = []
    differ = compared = 0
    try:
        for digested in _until(loader, MOST_S):
            read += digested
            subject.advance()
        own = (digests.__getitems__(batch) for batch in batches)
        for number, digested in enumerate(_until(own, MOST_S)):
            by_workers = read[AT_ONCE * number : AT_ONCE * number + len(digested)]
            differ += sum(a != b for a, b in zip(digested, by_workers, strict=False))
            compared += len(by_workers)
            subject.advance()
        if differ and digests.__getitems__(batches[0]) != digests.__getitems__(batches[0]):
            return ByWorkers()  # in the process itself they differ too: the check of the samples says so
    except NoDigest:  # the check of the samples says so
        return ByWorkers()
    except Exception as error:  # of a worker: its last line, after the traceback
        return ByWorkers(failed=(str(error).strip().splitlines() or [type(error).__name__])[-1][:300], needed=needed)
    return ByWorkers(differ, compared, needed=needed)


def _until(batches: Iterable[list[str]], seconds: float) -> Iterator[list[str]]:
    """Yield batches until the seconds since the first one are over."""
    end = None
    for batch in batches:
        yield batch
        end = end or time.perf_counter() + seconds
        if time.perf_counter() > end:
            return


def judge_workers(seen: Sequence[ByWorkers], case: Case) -> Iterator[Finding]:
    if failed := next((rank.failed for rank in seen if rank.failed), ""):
        means = "trials of these cells read their data through workers, and fail if this is no accident"
        means = means if seen[0].needed else NO_WORKERS
        yield Finding(NAME, "warning", f"loader workers: {failed}", means, remedy(failed) or "try loader.workers: 0")
    worst = max(seen, key=lambda rank: rank.differ)
    if worst.differ:
        text = f"{worst.differ} of {worst.compared:,} compared samples differ between the process itself and its "
        means = "what the data set opened or seeded before the workers were forked is shared by them, as an open file "
        means += "with one position: samples mix with others, or are read wrongly"
        advice = "open files in __getitem__, at the first use in each process, and compute samples from their index "
        severity: Severity = "error" if worst.needed else "warning"
        means += "" if worst.needed else f"; {NO_WORKERS}"
        yield Finding(NAME, severity, f"{text}loader workers", means, f"{advice}alone; or loader.workers: 0")


WORKERS_CHECK = Check(observe_workers, judge_workers, about=("datasets",), clue=r"open\(|File\(")


def observe_batches(subject: Subject) -> tuple[int, int, bool]:
    """Return what ``judge_batches`` judges; the step is the planned one, of all its micro-batches."""
    step = subject.cell.global_batch_size * (subject.planned or subject.cell).micro_batches
    return subject.training_samples, step, subject.epochs


def judge_batches(seen: Sequence[tuple[int, int, bool]], case: Case) -> list[Finding]:
    """Judge the training samples, the samples of a step, and whether the cell is trained for whole epochs."""
    samples, batch, epochs = seen[0]
    return checks.judge_batches(samples, batch, case.cell, epochs=epochs)


BATCHES_CHECK = Check(observe_batches, judge_batches)


def judge_padding(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    """Compare the tokens that loss() counted in the first step with the places of the batch, and with the real ones."""
    for rank, steps in enumerate(seen):
        padded, counted = steps.padded, steps.weights[0] if steps.weights else 0.0
        if steps.unit == "tokens" and padded.real < padded.places <= counted:
            text = f"tokens that loss() counts in a batch of rank {rank}: {counted:g}; places {padded.places:,}, of "
            text += f"which {padded.real:,} hold real tokens ({100 * padded.share:.0f} %)"
            means = "throughput counts padding, and the loss averages over it: both depend on which samples meet"
            advice = "return the number of real tokens as the weight, and leave padding out of the loss (ignore_index)"
            yield Finding(PADDING, "warning", text, means, advice)
            return
    share = min((steps.padded.share for steps in seen), default=1.0)
    if share < LEAST_REAL:
        text = f"real tokens in a padded batch: {100 * share:.0f} % of its places"
        advice = "batch samples of similar length together in the data set's order, or pack them"
        yield Finding(PADDING, "note", text, "most of a step computes on padding", advice)


def padding_figures(seen: Sequence[Steps], case: Case) -> Mapping[str, str]:
    """Return the share of real tokens, if the batch is padded."""
    shares = [steps.padded.share for steps in seen if steps.padded.places]
    return {"real tokens in a padded batch": f"{100 * sum(shares) / len(shares):.0f} %"} if shares else {}


PADDING_CHECK = Check(
    None,
    judge_padding,
    figures=padding_figures,
    about=("loss",),
    clue=r"ignore_index|cross_entropy|nll_loss",
)
