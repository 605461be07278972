"""Threads: computing threads and loader workers of a node against its processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.doctor.check import Case, Check
from harness.doctor.subject import ProcessState, Subject, processors
from harness.plan.cell import int_option, place
from harness.plan.checks.finding import Finding, join_names
from harness.train.ranks import crowded, pinned

NAME = "threads"


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


def observe(subject: Subject) -> Threads:
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


def judge(seen: Sequence[Threads], case: Case) -> list[Finding]:
    return [*(_crowded(seen, case) or _oversubscribed(seen, case) or _changed(seen)), *_started(seen)]


def _crowded(seen: Sequence[Threads], case: Case) -> list[Finding]:
    for node in [] if case.cell.oversubscribed else dict.fromkeys(rank.node for rank in seen):
        own = [(r.pinned, 1 if case.cell.device == "cuda" else r.threads) for r in seen if r.node == node]
        if shared := crowded(own):
            text = f"several ranks are pinned to the same processors of a node: {join_names(list(map(str, shared)))}"
            means = "they compute in turn, which looks like a slow exchange of gradients or slow memory"
            return [Finding(NAME, "warning", text, means, "pin each rank to processors of its own, or none (numactl)")]
    return []


def _changed(seen: Sequence[Threads]) -> list[Finding]:
    changed = [(rank, threads) for rank, threads in enumerate(seen) if threads.now != threads.before]
    return [
        Finding(
            NAME,
            "warning",
            f"computing threads of rank {rank}: {threads.now} after the model was built and trained, {threads.before} "
            "before",
            "the number of threads is no longer the same for every strategy, and strategies are not comparable",
            "remove torch.set_num_threads, which the harness calls itself (threads_per_device)",
        )
        for rank, threads in changed[:1]
    ]


def _started(seen: Sequence[Threads]) -> list[Finding]:
    ranks = [(rank, threads.started) for rank, threads in enumerate(seen) if threads.started]
    return [
        Finding(
            NAME,
            "warning",
            f"threads and processes that the workload started on rank {rank}: {len(started)} ({join_names(started)})",
            "they share the processors, and Python's interpreter lock, with the training steps",
            "start none in the workload; loader.workers reads data in processes of their own",
        )
        for rank, started in ranks[:1]
    ]


def _oversubscribed(seen: Sequence[Threads], case: Case) -> list[Finding]:
    if case.cell.oversubscribed:  # requested by the user, and a column of its rows
        return []
    by_node = [[rank for rank in seen if rank.node == node] for node in dict.fromkeys(r.node for r in seen)]
    loaders_each = int_option(case.cell.loader, "workers", 0) * place(case.cell).devices_per_worker
    busiest = max(by_node, key=lambda ranks: sum(r.threads + loaders_each for r in ranks) / ranks[0].processors)
    threads = sum(rank.threads for rank in busiest)
    workers = loaders_each * len(busiest)
    processors = busiest[0].processors
    if threads + workers <= processors:
        return []
    loaders = f" and {workers} loader workers" if workers else ""
    return [
        Finding(
            NAME,
            "warning",
            f"{threads} computing threads{loaders} on a node with {processors} processors "
            f"({busiest[0].threads} threads in the first of its {len(busiest)} rank{'s' * (len(busiest) > 1)})",
            "oversubscribed processors: slower and less regular steps, increasingly so with more ranks",
            "remove torch.set_num_threads, which the harness calls itself"
            if threads > processors
            else "reduce loader.workers",
        )
    ]


CHECK = Check(
    NAME,
    observe,
    judge,
    needs_peers=True,
    about=("build_model",),
    clue=r"Thread\(|Process\(|Popen\(|Pool|set_num_threads",
)
