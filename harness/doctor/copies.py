"""GPU copies: copies from one GPU to another, directly and through the host, are identical bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.measure.window import synchronize
from harness.plan.checks import Finding, join_names
from harness.system.process import die_with_parent

NAME = "GPU copies"
SIZES = (1_000, 1_000_000, 16_000_000)
"""Numbers of 8 bytes; corruption on a PCIe path may affect large copies only."""
REPEATS, MOST_COPIES = 3, 240
"""Repetitions of each size and pair, and the number of repetitions of all pairs of which there are fewer then."""
CHILD_S, POLL_S = 300.0, 1.0
"""The time after which the process that copies is ended, and the interval of the watchdog's resets meanwhile."""
Pair = tuple[str, str, str]
"""Source, target, way."""
Move = Callable[[Tensor, torch.device], Tensor]


@dataclass(frozen=True)
class Copied:
    """The pairs with corrupt copies, or the reason why they are not known."""

    wrong: Sequence[Pair] = ()
    failed: str = ""


def observe(subject: Subject) -> Copied:
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
    command = [sys.executable, "-P", "-c", "from harness.doctor.copies import main; main()", *devices]
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
    return max(1, min(REPEATS, MOST_COPIES // (devices * (devices - 1))))


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
                drawn += 1  # other numbers: freed memory holds those of the last copy
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


def judge(seen: Sequence[Copied], case: Case) -> list[Finding]:
    advice = "look for errors of the GPUs in nvidia-smi and dmesg, and examine again"
    found = [
        Finding(NAME, "warning", node.failed, "copies were not compared: corrupt ones would not be found", advice)
        for node in seen
        if node.failed
    ][:1]
    wrong = [pair for node in seen for pair in node.wrong]
    if not wrong:
        return found
    pairs = [f"{source} to {target} {way}" for source, target, way in wrong]
    return [
        *found,
        Finding(
            NAME,
            "error" if case.cell.traits.replicates else "warning",  # dp copies by itself; NCCL may go another way
            f"corrupt copies between GPUs: {join_names(pairs)}",
            "silent data corruption: wrong losses or NaN under DataParallel, and no valid result on such a pair",
            "disable the IOMMU or PCIe ACS in the firmware (or boot with iommu=pt), or use pairs with NVLink; "
            "NCCL_P2P_DISABLE has no effect on dp, which does not copy with NCCL",
        ),
    ]


CHECK = Check(NAME, observe, judge, stops=True)
