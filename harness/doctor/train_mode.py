"""Train mode: steps are taken in train mode, with more than one sample a device for batch statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding, join_names

NAME = "train mode"


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    return [*_evaluating(seen), *_one_sample(seen, case)]


def _evaluating(seen: Sequence[Steps]) -> Iterator[Finding]:
    layers = seen[0].mode_layers
    if layers and any(rank.evaluates for rank in seen):
        yield Finding(
            NAME,
            "warning",
            f"forward passes of training steps in eval mode; layers that it changes: {join_names(layers)}",
            "no dropout and no batch statistics: it is another training than the file says, and a cheaper step",
            "remove model.eval() from build_model(), forward and loss(); the harness evaluates in eval mode itself",
        )


def _one_sample(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    cell, norms = case.cell, seen[0].batch_norms
    if norms and cell.global_batch_size // cell.devices < 2:
        yield Finding(
            NAME,
            "warning",
            f"samples of a device in a step: {cell.global_batch_size // cell.devices}; layers with batch statistics: "
            f"{join_names(norms)}",
            "statistics of one sample: training is noise, and evaluation uses other statistics",
            "use a larger per-device batch, sync_batch_norm under ddp or fsdp, or GroupNorm",
        )


CHECK = Check(NAME, None, judge, about=("loss", "forward"), clue=r"\.eval\(|\.train\(")
