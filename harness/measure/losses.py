"""The losses of a training: step by step, the first that is not finite, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.measure.stepper import Stepper, TimedWindow
from harness.plan.rows import Json, TrialFacts
from harness.train.precision import LossScale

KEPT = 5
"""Number of finite losses that are reported."""
UNSKIPPED = 20
"""Updates in a row without a skip that end the warm-up of fp16."""
MOST_STEPS = 200
"""Warm-up steps after which the training counts as diverged if updates are still skipped."""
MOST_RECORDED = 10_000
"""The most steps of a training that are kept: of longer ones every second, third ... is."""
Kept = dict[str, list[float]]
"""The columns epoch, step (both from 1), loss and learning_rate."""


@dataclass(frozen=True)
class Divergence:
    """A divergence on one rank. ``step`` counts from 1 over the whole trial; None if only a parameter is not finite."""

    rank: int
    step: int | None = None
    loss: float = math.nan
    before: tuple[float, ...] = ()
    """The last finite losses, the latest at the end."""


def first_in(losses: npt.ArrayLike, rank: int, steps_before: int = 0) -> Divergence | None:
    """Return the first of one rank's losses that is not finite; None if all are."""
    seen = np.asarray(losses, dtype=float)
    bad = np.flatnonzero(~np.isfinite(seen))
    if not bad.size:
        return None
    place = int(bad[0])
    before = tuple(seen[max(0, place - KEPT) : place].tolist())
    return Divergence(rank, steps_before + place + 1, float(seen[place]), before)


def earliest(found: Iterable[Divergence | None]) -> Divergence | None:
    """Return the earliest of the ranks' divergences; None if there is none."""
    seen = [one for one in found if one]
    return min(seen, key=lambda one: (one.step or math.inf, one.rank), default=None)


def outcome_columns(divergence: Divergence | None, facts: TrialFacts) -> Json:
    """Return the fields of a TrialResult that hold its outcome and facts."""
    if divergence is None:
        return {"outcome": "ok", "facts": facts}
    rank, step = divergence.rank, divergence.step
    facts = {**facts, "diverged_step": step}
    if step is None:
        return {"outcome": "diverged", "reason": "a parameter stopped being finite, no loss did", "facts": facts}
    reason = f"the loss became {divergence.loss:g} on rank {rank} in step {step}"
    before = "".join(f"\nstep {step - len(divergence.before) + i}: {x:g}" for i, x in enumerate(divergence.before))
    detail = f"{reason}\n\nThe last finite losses of that rank (mean over its part of the batch):{before or ' none'}"
    return {"outcome": "diverged", "reason": reason, "error_rank": rank, "detail": detail, "facts": facts}


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


class StepLosses:
    """The losses of a training's steps, on rank 0 over all ranks. ``columns`` grows with each epoch.

    ``total``: the number of steps of the whole training, which decides the distance of the steps that are kept.
    """

    def __init__(self, total: int) -> None:
        self.every = max(1, math.ceil(total / MOST_RECORDED))
        self.columns: Kept = {"epoch": [], "step": [], "loss": [], "learning_rate": []}

    def add(
        self,
        epoch: int,
        steps_before: int,
        losses: Sequence[Sequence[float]],
        weights: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> None:
        """Add an epoch: the sum of the losses and the weight of each step by rank, and the rate of each step."""
        by_step = zip(zip(*losses, strict=True), zip(*weights, strict=True), rates, strict=True)
        for step, (sums, counts, rate) in enumerate(by_step, start=steps_before + 1):
            if (step - 1) % self.every == 0:
                row = {"epoch": epoch, "step": step, "loss": sum(sums) / max(sum(counts), 1.0), "learning_rate": rate}
                for name, value in row.items():
                    self.columns[name].append(value)
