"""Processor load of node and process around the timed windows: read before and after, never inside."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from harness.plan.rows import RankFacts


@dataclass(frozen=True)
class Load:
    """One instant on one rank: seconds of CPU time used by this process with its children, and by the node."""

    clock_s: float
    own_cpu_s: float
    node_cpu_s: float
    swapped_bytes: int


def read() -> Load:
    """Return the counters of node and process now; takes about a millisecond."""
    return Load(time.perf_counter(), _own_cpu_s(), _node_cpu_s(), _swapped_bytes())


def load_between(before: Load, after: Load) -> RankFacts:
    """Return a rank's columns: the time between two readings, and the CPU time and swap used in it."""
    return {
        "watched_s": after.clock_s - before.clock_s,
        "own_cpu_s": after.own_cpu_s - before.own_cpu_s,
        "node_cpu_s": after.node_cpu_s - before.node_cpu_s,
        "swapped_bytes": after.swapped_bytes - before.swapped_bytes,
    }


def _own_cpu_s() -> float:
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):  # loader workers work for us
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _node_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _swapped_bytes() -> int:
    swap = psutil.swap_memory()
    return int(swap.sin + swap.sout)
