"""Communication: copies between GPUs and collectives of the ranks give right results; the speed of the collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.values import MIB
from harness.doctor.subject import Case, Check, Subject
from harness.measure.links import Meter, backend_of, collectives
from harness.measure.window import synchronize
from harness.plan.cell import Cell
from harness.plan.checks import Finding, join_names
from harness.plan.rows import Severity
from harness.system.process import die_with_parent
from harness.train.ranks import Ranks

COPIES = "GPU copies"
SIZES = (1_000, 1_000_000, 16_000_000)
"""Numbers of 8 bytes; corruption on a PCIe path may affect large copies only."""
COPY_REPEATS, MOST_COPIES = 3, 240
"""Repetitions of each size and pair, and the number of repetitions of all pairs of which there are fewer then."""
CHILD_S, POLL_S = 300.0, 1.0
"""The time after which the process that copies is ended, and the interval of the watchdog's resets meanwhile."""
Pair = tuple[str, str, str]
"""Source, target, way."""
Move = Callable[[Tensor, torch.device], Tensor]
COLLECTIVES = "collectives"


@dataclass(frozen=True)
class Copied:
    """The pairs with corrupt copies, or the reason why they are not known."""

    wrong: Sequence[Pair] = ()
    failed: str = ""


def observe_copies(subject: Subject) -> Copied:
    """Return the pairs of this node's GPUs with corrupt copies; only the first rank of a node copies.

    A process of its own copies: its contexts, about 0.5 GB on every GPU, end with it, and no rank has less memory.
    """
    if subject.device.type != "cuda" or subject.ranks.local_rank:
        return Copied()
    indices = [device.index or 0 for device in dict.fromkeys(subject.ranks.devices)]
    if len(indices) == 1:  # one process a device: add the other GPUs, unless CUDA_VISIBLE_DEVICES hides them
        indices = list(range(torch.cuda.device_count()))
    return in_child([f"cuda:{index}" for index in indices], subject.advance) if len(indices) > 1 else Copied()


def in_child(devices: Sequence[str], advance: Callable[[], None]) -> Copied:
    """Return the corrupt pairs of these devices, copied in a new process, or the reason why it failed."""
    command = [sys.executable, "-P", "-c", "from harness.doctor.communication import main; main()", *devices]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            for _ in range(round(CHILD_S / POLL_S)):
                with suppress(subprocess.TimeoutExpired):
                    written, errors = process.communicate(timeout=POLL_S)
                    break
                advance()
            else:
                return Copied(failed=f"no result within {CHILD_S:.0f} s, between {', '.join(devices)}")
        finally:
            process.kill()  # no effect on one that has ended
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit {process.returncode}"]
        return Copied(failed=f"{lines[-1]}, between {', '.join(devices)}")
    return Copied([(source, target, way) for source, target, way in json.loads(written.splitlines()[-1])])


def repeats_of(devices: int) -> int:
    """Return the repetitions of each size and pair, which are fewer between many devices."""
    return max(1, min(COPY_REPEATS, MOST_COPIES // (devices * (devices - 1))))


def main() -> None:
    """Copy between the devices that the arguments name, and write the corrupt pairs as JSON."""
    die_with_parent()
    devices = [torch.device(name) for name in sys.argv[1:]]
    sys.stdout.write(json.dumps(corrupt_pairs(devices, SIZES, repeats_of(len(devices)), directly)) + "\n")


def corrupt_pairs(devices: Sequence[torch.device], sizes: Sequence[int], repeats: int, move: Move) -> list[Pair]:
    """Copy random integers between each ordered pair of devices; ``move`` copies directly. Return the corrupt pairs."""
    ways: dict[str, Move] = {"directly": move, "through the host": lambda tensor, to: tensor.cpu().to(to)}
    wrong: dict[Pair, None] = {}
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        drawn = torch.randint(-(2**62), 2**62, (size,), generator=generator)
        for source, target in permutations(devices, 2):
            for _ in range(repeats):
                drawn += 1  # other numbers: freed memory holds the numbers of the last copy
                there = drawn.to(source, copy=True)
                for way, copy in ways.items():
                    if not torch.equal(copy(there, target).cpu(), drawn):
                        wrong[str(source), str(target), way] = None
    return list(wrong)


def directly(tensor: Tensor, to: torch.device) -> Tensor:
    """Copy from one GPU to another, peer to peer if the driver allows it."""
    copied = tensor.to(to)
    synchronize((to,))
    return copied


def judge_copies(seen: Sequence[Copied], case: Case) -> Iterator[Finding]:
    if failed := next((node.failed for node in seen if node.failed), ""):
        means = "copies were not compared: corrupt ones would not be found"
        advice = "look for errors of the GPUs in nvidia-smi and dmesg, and examine again"
        yield Finding(COPIES, "warning", failed, means, advice)
    if pairs := [f"{source} to {target} {way}" for node in seen for source, target, way in node.wrong]:
        # dp copies by itself; NCCL may go another way
        severity: Severity = "error" if case.cell.traits.replicates else "warning"
        means = "silent data corruption: wrong losses or NaN under DataParallel, and no valid result on such a pair"
        advice = "disable the IOMMU or PCIe ACS in the firmware (or boot with iommu=pt), or use pairs with NVLink; "
        advice += "NCCL_P2P_DISABLE has no effect on dp, which does not copy with NCCL"
        yield Finding(COPIES, severity, f"corrupt copies between GPUs: {join_names(pairs)}", means, advice)


COPIES_CHECK = Check(observe_copies, judge_copies, stops=True)


@dataclass(frozen=True)
class Exchange:
    """The collectives as one rank measured them: the operations with wrong results, and the seconds of an all-reduce.

    ``bucket``: size of the second all-reduce in bytes; the first is of one number a rank.
    """

    wrong: list[str]
    latency_s: float
    bucket: int
    bucket_s: float


def observe(subject: Subject) -> Exchange | None:
    """Check all-reduce and broadcast of a number and of a bucket, and time the all-reduces; None with one rank."""
    ranks = subject.ranks
    if ranks.world_size == 1:
        return None
    all_reduce = collectives(ranks, backend_of(subject.device.type), ())[0][0]
    sizes = [all_reduce.size(wanted) for wanted in (1, bucket_bytes(subject.cell, subject.steps[0].parameter_bytes))]
    wrong = [text for size in sizes for text in wrong_results(ranks, size)]
    meter = Meter(ranks, subject.advance)
    latency_s, bucket_s = (median(meter.seconds(all_reduce, size, 1)) for size in sizes)
    return Exchange(wrong, latency_s, sizes[1], bucket_s)


def wrong_results(
    ranks: Ranks,
    size: int,
    reduce: Callable[[Tensor], object] = dist.all_reduce,
    copy: Callable[[Tensor, int], object] = dist.broadcast,
) -> list[str]:
    """Return the operations whose result at this size in bytes is wrong on this rank."""
    own = torch.full((size // 4,), float(ranks.rank + 1), device=ranks.devices[0])
    summed, copied = own.clone(), own.clone()
    reduce(summed)
    copy(copied, 0)
    right = {
        "all-reduce": bool((summed == ranks.world_size * (ranks.world_size + 1) / 2).all()),
        "broadcast": bool((copied == 1.0).all()),
    }
    return [f"{name} of {size:,} bytes" for name, is_right in right.items() if not is_right]


def judge(seen: Sequence[Exchange | None], case: Case) -> Iterator[Finding]:
    if wrong := {rank: result.wrong for rank, result in enumerate(seen) if result and result.wrong}:
        what, ranks = ", ".join(next(iter(wrong.values()))), ", ".join(map(str, wrong))
        text = f"wrong results of {what} on rank {ranks} of {len(seen)}"
        means = "wrong averages of gradients over the ranks: every result of such a training is wrong"
        advice = "check the version of the backend and the network; on GPUs, run nccl-tests"
        yield Finding(COLLECTIVES, "error", text, means, advice)


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
    cap = cell.strategy_options.get("bucket_cap_mb", 25)
    assert isinstance(cap, int | float)
    return max(8, min(int(cap * MIB), parameter_bytes) // 4 * 4)


CHECK = Check(observe, judge, needs_peers=True, figures=figures)
