"""Collectives: results of all-reduce and broadcast over these ranks, and their speed at the sizes of the model."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.values import MIB
from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.measure.window import synchronize
from harness.plan.cell import Cell, int_option
from harness.plan.checks import Finding

NAME = "collectives"
REPEATS, ROUNDS = 5, 8
SLOW = 2.5
"""A rank is slow if the same small work takes this many times as long as on the fastest rank."""
SIDE, SIDE_ON_GPU = 128, 2048
"""Side of the matrices that measure a rank's own speed; on a GPU large enough to hide the launch."""


@dataclass(frozen=True)
class Exchange:
    """The collectives as one rank measured them. Times are medians in seconds."""

    wrong: list[str]
    """The operations with wrong results."""
    latency_s: float
    bucket: int
    """Bytes."""
    bucket_s: float
    own_s: float
    """Time of a small matrix product on the rank's own device."""
    host: str


def observe(
    subject: Subject,
    reduce: Callable[[Tensor], object] = dist.all_reduce,
    copy: Callable[[Tensor, int], object] = dist.broadcast,
) -> Exchange | None:
    """Check the results of all-reduce and broadcast, and time all-reduce of one number and of one bucket.

    Returns None if there is only one rank.
    """
    ranks = subject.ranks
    if ranks.world_size == 1:
        return None
    bucket = bucket_bytes(subject.cell, subject.steps[0].parameter_bytes)
    wrong, times = [], {}
    for size in (4, bucket):
        own = torch.full((size // 4,), float(ranks.rank + 1), device=subject.device)
        summed = own.clone()
        reduce(summed)
        if not bool((summed == ranks.world_size * (ranks.world_size + 1) / 2).all()):
            wrong.append(f"all-reduce of {size:,} bytes")
        copied = own.clone()
        copy(copied, 0)
        if not bool((copied == 1.0).all()):
            wrong.append(f"broadcast of {size:,} bytes")
        times[size] = _median(lambda own=own: reduce(own), ranks.barrier, subject)  # type: ignore[misc]
    own_s = _own_speed(subject.device)
    return Exchange(wrong, times[4], bucket, times[bucket], own_s, socket.gethostname())


def judge(seen: Sequence[Exchange | None], case: Case) -> list[Finding]:
    results = [result for result in seen if result]  # all None with a single rank
    if not results:
        return []
    found = []
    wrong = {rank: result.wrong for rank, result in enumerate(results) if result.wrong}
    if wrong:
        what = next(iter(wrong.values()))
        found.append(
            Finding(
                NAME,
                "error",
                f"wrong results of {', '.join(what)} on rank {', '.join(map(str, wrong))} of {len(results)}",
                "wrong averages of gradients over the ranks: every result of such a training is wrong",
                "check the version of the backend and the network; on GPUs, run nccl-tests",
            )
        )
    fastest = min(result.own_s for result in results)
    slow = [rank for rank, result in enumerate(results) if result.own_s > SLOW * fastest]
    if slow:
        times = ", ".join(f"{1000 * result.own_s:.1f}" for result in results)
        found.append(
            Finding(
                NAME,
                "warning",
                f"time of the same matrix product on ranks 0 to {len(results) - 1}: {times} ms; slow: "
                + ", ".join(f"rank {rank} on {results[rank].host}" for rank in slow),
                "a slow rank: every step takes as long as on the slowest rank",
                "check that host for other load, lowered clocks or another device model",
            )
        )
    return found


def figures(seen: Sequence[Exchange | None], case: Case) -> dict[str, str]:
    """Return the time of all-reduce and its bus bandwidth, by title.

    Bus bandwidth as nccl-tests defines it: 2(n - 1)/n times bytes over seconds (PERFORMANCE.md there).
    """
    results = [result for result in seen if result]
    if not results:
        return {}
    latency = max(result.latency_s for result in results)
    bucket, seconds = results[0].bucket, max(result.bucket_s for result in results)
    rate = 2 * (len(results) - 1) / len(results) * bucket / seconds / 1e9
    size = f"{bucket / MIB:.1f} MiB" if bucket >= MIB / 10 else f"{bucket:,} bytes"
    return {
        "all-reduce of a number": f"{1e6 * latency:,.0f} us",
        f"all-reduce of {size}": f"{1000 * seconds:,.2f} ms, bus bandwidth {rate:,.2f} GB/s",
    }


def bucket_bytes(cell: Cell, parameter_bytes: int) -> int:
    """Return the size of a ddp message: a bucket, or the whole gradient if that is smaller."""
    cap = int_option(cell.strategy_options, "bucket_cap_mb", 25) * MIB
    return max(8, min(cap, parameter_bytes) // 4 * 4)


def _median(work: Callable[[], object], barrier: Callable[[], None], subject: Subject) -> float:
    times = []
    for _ in range(REPEATS):
        barrier()
        synchronize(subject.ranks.devices)
        start = time.perf_counter()
        work()
        synchronize(subject.ranks.devices)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _own_speed(device: torch.device) -> float:
    """Return seconds of a small matrix product on the device: the minimum of many, which hides passing load."""
    side = SIDE_ON_GPU if device.type == "cuda" else SIDE
    a = torch.ones(side, side, device=device)
    best = float("inf")
    for _ in range(ROUNDS):
        time.sleep(0.005)  # yield the core, so that the next measurement starts with a new time slice
        for _ in range(20):
            synchronize((device,))
            start = time.perf_counter()
            a @ a
            synchronize((device,))
            best = min(best, time.perf_counter() - start)
    return best


CHECK = Check(NAME, observe, judge, needs_peers=True, figures=figures)
