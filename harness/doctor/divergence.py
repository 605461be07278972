"""Divergence: the first losses are finite and do not grow, or they do on one device too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.doctor.check import Case, Check, any_error
from harness.doctor.steps import Steps, mean_losses
from harness.plan.checks.finding import Finding

NAME = "divergence"
GROWTH, LEAST = 4.0, 0.5
"""A loss diverges beyond GROWTH times the first loss plus LEAST; the first may be near zero."""


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    cell, losses, alone = case.cell, mean_losses(seen), seen[0].single_device_losses
    if not diverges(losses):
        return []
    here = f"{cell.strategy} x{cell.devices}: losses {_format_losses(losses)} at a learning rate of {seen[0].lr:g}"
    if alone and not diverges(alone):
        return [
            Finding(
                NAME,
                "error",
                f"{here}; one device on the same batches: {_format_losses(alone)}",
                "not the learning rate: this strategy is not equivalent to one device",
                "look at the other findings; on GPU pairs without NVLink, at whether copies between them arrive",
            )
        ]
    also = f"; one device on the same batches does too: {_format_losses(alone)}" if alone else ""
    return [
        Finding(
            NAME,
            "warning",
            here + also,
            "the training diverges from its first steps: its cells end as diverged rows",
            "a smaller learning rate, or a warm-up",
        )
    ]


def diverges(losses: Sequence[float]) -> bool:
    """Return whether a loss is not finite, or the last one exceeds GROWTH times the first plus LEAST."""
    if not all(map(math.isfinite, losses)):
        return True
    return losses[-1] > GROWTH * abs(losses[0]) + LEAST


def _format_losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.3g}" for loss in losses)


CHECK = Check(NAME, None, judge, redundant=any_error)
