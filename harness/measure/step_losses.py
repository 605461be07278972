"""The loss and the learning rate of a training, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MOST_STEPS = 10_000
"""The most steps of a training that are kept: of longer ones every second, third ... is."""
Kept = dict[str, list[float]]
"""The columns epoch, step (both from 1), loss and learning_rate."""


class StepLosses:
    """The losses of a training's steps, over all ranks, alike on every rank. ``columns`` grows with each epoch.

    ``total``: the number of steps of the whole training, which decides the distance of the steps that are kept.
    """

    def __init__(self, total: int) -> None:
        self.every = max(1, math.ceil(total / MOST_STEPS))
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

    def restore(self, kept: Mapping[str, Sequence[float]]) -> None:
        """Restore the steps of a checkpoint; those of earlier versions hold none."""
        for name, values in self.columns.items():
            values[:] = kept.get(name, [])
