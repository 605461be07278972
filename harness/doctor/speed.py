"""Speed: the loader against the model, a step on each rank without the others, threads against processors."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch

from harness.doctor.real_steps import observe_own_part
from harness.doctor.subject import Case, Check, ProcessState, Subject, any_error
from harness.measure.window import elapsed_s
from harness.plan.cell import int_option, place
from harness.plan.checks import SLOW_OF_FEW, THREADS, Finding, join_names
from harness.plan.checks import judge_threads as judge_node
from harness.plan.rows import TrialFacts
from harness.train.loader import Batches, endless_shares, workers_of
from harness.train.ranks import Ranks, crowded, pinned, processors
from harness.train.workloads import collate_of

NAME = "loader throughput"
SECONDS, LIMIT_S = 0.3, 10.0
"""Least time of the timed batches, and the limit of the whole measurement."""
MARGIN = 1.25
"""Least ratio of the loader's time to the model's that is a finding: both are short, and a machine's speed varies."""
LEAST, MOST_SAMPLES = 3, 64
"""Smallest number of timed batches, and largest number of samples in the batch of a rank."""
SPARE, BY_ITSELF = 2.0, 0.1
"""The rate of enough loader workers as a multiple of the examined model's, since that of a cell in lower precision is
higher; and the share of a model's time that a rank may spend on loading by itself."""
SLOW_RANK = "slow rank"
LEAST_S = 0.005
"""A rank is slow if its step takes SLOW_OF_FEW times as long as the fastest rank's, and this many seconds more."""
ROUNDS, PAUSE_S = 8, 0.05
"""Most repetitions of the steps while a rank is slow, and the time before the first; each is twice as long."""
SIDE, SIDE_ON_GPU, PRODUCTS = 128, 2048, 100
"""Side of the matrices, on a GPU large enough to hide the launch, and the number of products."""


@dataclass(frozen=True)
class Rate:
    """Seconds a sample of all ranks' loaders. ``complete``: False if time was up, so that they are an upper bound.

    ``processors``: the node's processors that this process may use, over the node's devices. ``workers``: of a device.
    """

    sample_s: float
    complete: bool = True
    processors: int = 1
    workers: int = 0


def observe(subject: Subject) -> Rate | None:
    """Return the steady rate of the loader; None if the data is on the device."""
    cell, ranks = subject.cell, subject.ranks
    if cell.data == "synthetic_device":
        return None
    batch = min(cell.global_batch_size, MOST_SAMPLES * ranks.world_size)
    collate = collate_of(subject.workload)
    loader = Batches(subject.datasets[0], seed=subject.seed, ranks=ranks, options=cell.loader, collate=collate)
    shares = endless_shares(subject.training_samples, batch, subject.seed, ranks.rank, ranks.world_size)
    workers = workers_of(cell.loader, subject.device.type, subject.datasets[0])
    batch_s, complete = time_batches(
        loader.of(shares), workers * subject.replicas, int_option(cell.loader, "prefetch_factor", 2)
    )
    return Rate(batch_s / batch, complete, processors() // (cell.devices // cell.nodes), workers)


def time_batches(
    fetch: Iterator[object], workers: int, prefetch: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, bool]:
    """Return the seconds of a batch, from the median of at least two full rounds of all workers, and True.

    Workers deliver in bursts of one batch each, so that the median gap between batches is the time to take a ready one;
    a round of all workers has one burst. The first batches are left out: the workers start, and fill their queues. If
    time is up, the value is the mean of all batches since the start, which is longer, and the second one is False.
    """
    size = max(1, workers)
    start = clock()
    dropped = max(1, workers * prefetch)
    ends: list[float] = []  # of the last batch left out, and of each round after it
    for taken, _ in enumerate(fetch, 1):
        now = clock()
        if taken >= dropped and (taken - dropped) % size == 0:
            ends.append(now)
            timed = taken - dropped
            if timed >= max(LEAST, 2 * workers) and now - ends[0] >= SECONDS:
                return statistics.median(late - early for early, late in pairwise(ends)) / size, True
        if now - start >= LIMIT_S:
            return (now - start) / taken, False
    raise ValueError("the loader ended: it must be endless")


def judge(seen: Sequence[Rate | None], case: Case) -> Iterator[Finding]:
    slowest, model = _slowest(seen), _step_s(case) / case.cell.global_batch_size
    if slowest is None or slowest.sample_s <= MARGIN * model:
        return
    workers = slowest.workers
    rates = f"loader alone, {workers} workers a device: {_format(slowest)}; model alone: {1 / model:,.0f} samples/s"
    if not slowest.complete:
        means = f"perhaps loader-bound: no steady rate of the loader within {LIMIT_S:.0f} s"
        yield Finding(NAME, "note", rates, means, "compare with a cell of data: synthetic_device")
        return
    needed = math.ceil(max(1, workers) * slowest.sample_s / model)
    decided = facts(seen, case).get("loader_workers", 0)
    has = f"trials have {decided} loader worker{'s' * (decided != 1)} a device, which the file leaves open"
    if decided >= needed:
        yield Finding(NAME, "note", rates, f"loading takes longer than computing: {has}", "nothing to do")
        return
    if needed <= slowest.processors:
        first = f"set loader.workers to {needed}, make samples cheaper"
    else:
        first = f"make samples cheaper ({needed} workers a device, for which it has {slowest.processors} processors)"
    means = "loader-bound: the measured throughput and scaling are those of the loader"
    means += f"; {has}" if decided else ""
    yield Finding(NAME, "warning", rates, means, f"{first}, or measure with data: synthetic_device")


def facts(seen: Sequence[Rate | None], case: Case) -> TrialFacts:
    """Return the loader workers of a device that keep up with the model, if the file leaves their number open.

    Each has a processor of its own, and the rank one; none where loading takes little of the model's time.
    """
    slowest = _slowest(seen)
    if slowest is None or case.cell.loader.get("workers", 0) is not None:
        return {}
    busy = max(1, slowest.workers) * slowest.sample_s * case.cell.global_batch_size / _step_s(case)
    most = max(1, slowest.processors - 1)
    return {"loader_workers": 0 if busy <= BY_ITSELF else min(math.ceil(SPARE * busy), most)}


def figures(seen: Sequence[Rate | None], case: Case) -> dict[str, str]:
    """Return the rates of the model and of the loader, by title."""
    rates_by_title = {"model alone": f"{case.cell.global_batch_size / _step_s(case):,.0f} samples/s"}
    if slowest := _slowest(seen):
        rates_by_title["loader alone"] = _format(slowest)
    return rates_by_title


def _slowest(seen: Sequence[Rate | None]) -> Rate | None:
    return max((rate for rate in seen if rate), key=lambda rate: rate.sample_s, default=None)


def _format(rate: Rate) -> str:
    return f"{'' if rate.complete else 'at least '}{1 / rate.sample_s:,.0f} samples/s"


def _step_s(case: Case) -> float:
    """Return the step time of the slowest rank, without the loader."""
    return max(rank.step_s for rank in case.steps)


CHECK = Check(
    observe,
    judge,
    needs_steps=True,
    # after an error or a warning the step time may be that of a faulty model
    redundant=lambda findings: any(finding.severity != "note" for finding in findings),
    figures=figures,
    facts=facts,
    about=("datasets",),
)


@dataclass(frozen=True)
class Alone:
    """The seconds of one rank's fastest step, or of its products, without the other ranks, and its host."""

    seconds: float
    host: str


def observe_slow_rank(subject: Subject) -> Alone:
    """Time this rank's fastest step alone, or products of matrices if that is too short, or the model does not fit.

    The steps are repeated by all ranks with the first rank's part of the batch: parts may differ in their cost.
    """
    ranks, host = subject.ranks, socket.gethostname()
    if ranks.world_size == 1:
        return Alone(0.0, host)
    same = replace(subject, ranks=replace(ranks, rank=0))
    steps_s: Sequence[float] = [steps.own_step_s for steps in subject.steps]
    if all(steps_s):
        steps_s = _repeated(steps_s, ranks, lambda: observe_own_part(same.fresh()).step_s)
    if not all(steps_s) or (min(steps_s) < LEAST_S and not _slow(steps_s)):
        products_s = ranks.gather(_products_s(subject.device))
        steps_s = _repeated(products_s, ranks, lambda: _products_s(subject.device))
    return Alone(steps_s[ranks.rank], host)


def _repeated(seconds: Sequence[float], ranks: Ranks, again: Callable[[], float]) -> Sequence[float]:
    """Return the seconds of all ranks; if one is slow, the least of further measurements: other load may pass."""
    own = math.inf
    for number in range(ROUNDS):
        if not _slow(seconds):
            break
        time.sleep(PAUSE_S * 2**number)
        own = min(own, again())
        seconds = ranks.gather(own)
    return seconds


def _products_s(device: torch.device) -> float:
    """Return the seconds of PRODUCTS matrix products, from the fastest one."""
    matrix, fastest = torch.ones((SIDE_ON_GPU if device.type == "cuda" else SIDE,) * 2, device=device), math.inf
    for _ in range(PRODUCTS):
        fastest = min(fastest, elapsed_s(lambda: matrix @ matrix, (device,)))
    return PRODUCTS * fastest


def judge_slow_rank(seen: Sequence[Alone], case: Case) -> Iterator[Finding]:
    """Compare the times of the ranks alone."""
    slow = _slow([rank.seconds for rank in seen])
    if not slow:
        return
    times = ", ".join(f"{1000 * rank.seconds:.1f}" for rank in seen)
    same = f"time of the same work on ranks 0 to {len(seen) - 1}, each without the others"
    hosts = ", ".join(f"rank {rank} on {seen[rank].host}" for rank in slow)
    text = f"{same}: {times} ms; slow: {hosts}"
    means = "a step of several ranks takes as long as on the slowest: the others wait"
    advice = "look for work of one rank alone (logging, metrics, files), and on its host for other load and lower "
    yield Finding(SLOW_RANK, "warning", text, means, f"{advice}clocks")


def _slow(seconds: Sequence[float]) -> list[int]:
    fastest = min(seconds)
    return [rank for rank, own in enumerate(seconds) if own > max(SLOW_OF_FEW * fastest, fastest + LEAST_S)]


SLOW_RANK_CHECK = Check(
    observe_slow_rank,
    judge_slow_rank,
    needs_peers=True,
    redundant=any_error,
    about=("loss", "forward"),
    clue=r"get_rank|RANK",
)


@dataclass(frozen=True)
class Threads:
    """The computing threads of one rank, the processors that its process may use, and its node."""

    threads: int
    processors: int
    node: int
    before: int
    """The computing threads before the examination, as the harness sets them."""
    now: int
    started: list[str]
    """Python threads and processes that the workload started."""
    pinned: frozenset[int] = frozenset()
    """The processors that the training thread is pinned to, which the process's main thread need not be."""


def observe_threads(subject: Subject) -> Threads:
    """Count the threads after model and steps, which may have changed their number."""
    now = ProcessState.now()
    earlier = subject.process or now
    return Threads(
        threads=torch.get_num_threads() * (subject.replicas if subject.device.type == "cpu" else 1),
        processors=processors(),
        node=subject.ranks.node_rank,
        before=earlier.threads,
        now=now.threads,
        started=now.started_since(earlier),
        pinned=pinned(),
    )


def judge_threads(seen: Sequence[Threads], case: Case) -> Iterator[Finding]:
    crowding = [] if case.cell.oversubscribed else _crowding(seen, case)
    yield from crowding
    changed = ((rank, each) for rank, each in enumerate(seen) if each.now != each.before and not crowding)
    for rank, each in islice(changed, 1):
        text = f"{each.now} after the model was built and trained, {each.before} before"
        means = "the number of threads is no longer the same for every strategy, and strategies are not comparable"
        advice = "remove torch.set_num_threads, which the harness calls itself (threads_per_device)"
        yield Finding(THREADS, "warning", f"computing threads of rank {rank}: {text}", means, advice)
    started = ((rank, each.started) for rank, each in enumerate(seen) if each.started)
    for rank, names in islice(started, 1):
        text = f"threads and processes that the workload started on rank {rank}: {len(names)} ({join_names(names)})"
        means = "they share the processors, and Python's interpreter lock, with the training steps"
        advice = "start none in the workload; loader.workers reads data in processes of their own"
        yield Finding(THREADS, "warning", text, means, advice)


def _crowding(seen: Sequence[Threads], case: Case) -> list[Finding]:
    """Return a finding on ranks that are pinned to the same processors, else on threads beyond a node's processors."""
    by_node = [[rank for rank in seen if rank.node == node] for node in dict.fromkeys(r.node for r in seen)]
    for ranks in by_node:
        if shared := crowded([(r.pinned, 1 if case.cell.device == "cuda" else r.threads) for r in ranks]):
            text = f"several ranks are pinned to the same processors of a node: {join_names(list(map(str, shared)))}"
            means = "they compute in turn, which looks like a slow exchange of gradients or slow memory"
            advice = "pin each rank to processors of its own, or none (numactl)"
            return [Finding(THREADS, "warning", text, means, advice)]
    loaders_each = int_option(case.cell.loader, "workers", 0) * place(case.cell).devices_per_worker
    busiest = max(by_node, key=lambda ranks: sum(r.threads + loaders_each for r in ranks) / ranks[0].processors)
    less = ("remove torch.set_num_threads, which the harness calls itself", "reduce loader.workers")
    return judge_node([r.threads for r in busiest], loaders_each * len(busiest), busiest[0].processors, less)


THREADS_CHECK = Check(
    observe_threads,
    judge_threads,
    needs_peers=True,
    about=("build_model",),
    clue=r"Thread\(|Process\(|Popen\(|Pool|set_num_threads",
)
