"""GPU copies: copies from one GPU to another, directly and through the host, are identical bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor

from harness.doctor.check import Case, Check
from harness.doctor.subject import Subject
from harness.plan.checks.finding import Finding, join_names

NAME = "GPU copies"
SIZES = (1_000, 1_000_000, 16_000_000)
"""Numbers of 8 bytes; corruption on a PCIe path may affect large copies only."""
REPEATS = 3
Pair = tuple[str, str, str]
"""Source, target, way."""
Move = Callable[[Tensor, torch.device], Tensor]


def observe(subject: Subject) -> list[Pair]:
    """Return the pairs of this node's GPUs with corrupt copies; only the first rank of a node copies."""
    if subject.device.type != "cuda" or subject.ranks.local_rank:
        return []
    devices = list(subject.ranks.devices)
    if len(devices) == 1:  # one process a device: add the other GPUs, unless CUDA_VISIBLE_DEVICES hides them
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return corrupt_pairs(list(dict.fromkeys(devices)), SIZES, REPEATS, directly)


def corrupt_pairs(devices: Sequence[torch.device], sizes: Sequence[int], repeats: int, move: Move) -> list[Pair]:
    """Copy random integers between each ordered pair of devices; ``move`` copies directly. Return the corrupt pairs."""
    ways: dict[str, Move] = {"directly": move, "through the host": lambda tensor, to: tensor.cpu().to(to)}
    wrong: dict[Pair, None] = {}
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        for source, target in permutations(devices, 2):
            for _ in range(repeats):
                sent = torch.randint(-(2**62), 2**62, (size,), generator=generator)
                there = sent.to(source)
                for way, copy in ways.items():
                    if not torch.equal(copy(there, target).cpu(), sent):
                        wrong[str(source), str(target), way] = None
    return list(wrong)


def directly(tensor: Tensor, to: torch.device) -> Tensor:
    """Copy from one GPU to another, peer to peer if the driver allows it."""
    copied = tensor.to(to)
    torch.cuda.synchronize(to)
    return copied


def judge(seen: Sequence[list[Pair]], case: Case) -> list[Finding]:
    wrong = [pair for node in seen for pair in node]
    if not wrong:
        return []
    pairs = [f"{source} to {target} {way}" for source, target, way in wrong]
    return [
        Finding(
            NAME,
            "error" if case.cell.traits.replicates else "warning",  # dp copies by itself; NCCL may go another way
            f"corrupt copies between GPUs: {join_names(pairs)}",
            "silent data corruption: wrong losses or NaN under DataParallel, and no valid result on such a pair",
            "disable the IOMMU or PCIe ACS in the firmware (or boot with iommu=pt), or use pairs with NVLink; "
            "NCCL_P2P_DISABLE has no effect on dp, which does not copy with NCCL",
        )
    ]


CHECK = Check(NAME, observe, judge, stops=True)
