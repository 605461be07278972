"""Threads: computing threads and loader workers of a node against its processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.cell import int_option
from harness.plan.checks.finding import Finding
from harness.plan.placement import place

NAME = "threads"


@dataclass(frozen=True)
class Threads:
    """The computing threads of one rank, the processors that it may use, and its node."""

    threads: int
    processors: int
    node: int


def observe(subject: Subject) -> Threads:
    """Count the threads after model and steps, which may have changed their number."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    return Threads(
        threads=torch.get_num_threads() * (subject.replicas if subject.device.type == "cpu" else 1),
        processors=len(allowed) if allowed else psutil.cpu_count() or 1,
        node=subject.ranks.node_rank,
    )


def judge(seen: Sequence[Threads], case: Case) -> list[Finding]:
    if case.cell.oversubscribe:  # requested by the user, and a column of its rows
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


CHECK = Check(NAME, observe, judge, needs_peers=True)
