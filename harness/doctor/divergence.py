"""Divergence: losses of the first steps that are not finite or that grow, against those of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.doctor.check import Case, Check, any_error
from harness.doctor.gate import DIVERGENCE, diverges
from harness.doctor.steps import Steps, mean_losses
from harness.plan.checks.finding import Finding

NAME = DIVERGENCE


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    cell, losses, alone = case.cell, mean_losses(seen), seen[0].single_device_losses
    if not diverges(losses):
        return []
    stops = not all(map(math.isfinite, losses))
    here = (
        f"losses of {cell.strategy} on {cell.devices} device{'s' * (cell.devices > 1)} at a learning rate of "
        f"{seen[0].lr:g}: {_format_losses(losses)}"
    )
    if alone and not diverges(alone):
        return [
            Finding(
                NAME,
                "error",
                f"{here}; on one device, same batches: {_format_losses(alone)}",
                "the strategy is not equivalent to one device; the learning rate is not the cause",
                "see the other findings; on pairs of GPUs without NVLink, check the copies between them (nccl-tests)",
                stops=stops,
            )
        ]
    also = f"; on one device, same batches: {_format_losses(alone)}" if alone else ""
    return [
        Finding(
            NAME,
            "error" if stops else "warning",
            here + also,
            f"divergence in the first steps{', on one device too' if alone else ''}: such cells are "
            + ("not measured" if stops else "tried once, and not in further blocks if they diverge there too"),
            "use a smaller learning rate, or a learning-rate warm-up (training.warmup_epochs)",
            stops=stops,
        )
    ]


def _format_losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.3g}" for loss in losses)


CHECK = Check(NAME, None, judge, redundant=any_error, about=("loss", "forward"))
