"""The loss scale of fp16 around timed windows: a warm-up until no update is skipped, and the skips of the windows."""

from __future__ import annotations

from harness.measure.stepper import Stepper, TimedWindow
from harness.plan.rows import TrialFacts
from harness.train.loss_scale import LossScale

UNSKIPPED = 20
"""Updates in a row without a skip that end the warm-up of fp16."""
MOST_STEPS = 200
"""Warm-up steps after which the training counts as diverged if updates are still skipped."""


class ScaleDiverged(Exception):
    """Updates are still skipped after MOST_STEPS; raised on every rank alike."""


def rounds_until_unskipped(stepper: Stepper, steps: int, taken: int) -> list[TimedWindow]:
    """Take further warm-up rounds of ``steps`` until UNSKIPPED updates in a row; raise ScaleDiverged.

    ``taken``: the warm-up steps before. No round unless the precision is fp16.
    """
    rounds: list[TimedWindow] = []
    while scale := stepper.ranks.broadcast(stepper.training.loss_scale()):
        if scale.unskipped >= UNSKIPPED:
            break
        if taken >= MOST_STEPS:
            raise ScaleDiverged(
                f"updates are still skipped after {taken} warm-up steps: gradients overflow float16 at a loss scale of "
                f"{scale.scale:g}"
            )
        rounds.append(stepper.window("warmup", steps))
        taken += steps
    return rounds


def scale_columns(before: LossScale | None, after: LossScale | None, steps: int) -> TrialFacts:
    """Return the loss scale after ``steps`` timed steps, and how many of them were skipped; empty unless fp16."""
    if before is None or after is None:
        return {}
    return {"loss_scale": after.scale, "skipped_updates": after.skipped_since(before, steps)}
