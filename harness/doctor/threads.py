"""Threads: no more of them compute at once than the node has cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding

NAME = "threads"


@dataclass(frozen=True)
class Threads:
    """One rank's computing threads, and the processors that it may use."""

    threads: int
    processors: int
    node: int


def observe(subject: Subject) -> Threads:
    """Threads of this rank after it has built and stepped; the processors it may use."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    return Threads(
        threads=torch.get_num_threads() * (subject.replicas if subject.device.type == "cpu" else 1),
        processors=len(allowed) if allowed else psutil.cpu_count() or 1,
        node=subject.ranks.node_rank,
    )


def judge(seen: Sequence[Threads], case: Case) -> list[Finding]:
    if case.cell.oversubscribe:  # asked for, and its rows say so
        return []
    by_node = [[rank for rank in seen if rank.node == node] for node in dict.fromkeys(r.node for r in seen)]
    loaders_each = int(case.cell.loader.get("workers", 0))
    mine = max(by_node, key=lambda ranks: sum(r.threads + loaders_each for r in ranks) / ranks[0].processors)
    threads = sum(rank.threads for rank in mine)
    workers = loaders_each * len(mine)
    processors = mine[0].processors
    if threads + workers <= processors:
        return []
    loaders = f" and {workers} loader workers" if workers else ""
    return [
        Finding(
            NAME,
            "warning",
            f"{threads} computing threads{loaders} on a node with {processors} processors "
            f"({mine[0].threads} threads in the first of its {len(mine)} rank{'s' * (len(mine) > 1)})",
            "they take turns: steps are slower and uneven, and the more so the more ranks there are",
            "leave torch.set_num_threads to the harness" if threads > processors else "fewer loader.workers",
        )
    ]


CHECK = Check(NAME, observe, judge, needs_peers=True)
