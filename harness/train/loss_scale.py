"""The loss scale of fp16 (Micikevicius et al. 2018, arXiv 1710.03740): steps that it skipped, read between windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler

FEW_STEPS_SCALE = 1024.0
"""A scale for checks of a few steps: at GradScaler's first, 65,536, updates are skipped until it has fallen."""


@dataclass(frozen=True)
class LossScale:
    """The state of a GradScaler. ``unskipped``: updates in a row without a skip or a growth of the scale.

    A step whose gradients are not finite is skipped and halves the scale; ``growth_interval`` updates double it.
    """

    scale: float
    unskipped: int
    growth_interval: int

    @classmethod
    def of(cls, scaler: GradScaler) -> LossScale:
        """Read the state from the device: between windows, since the host waits for it."""
        state = scaler.state_dict()
        return cls(float(state["scale"]), int(state["_growth_tracker"]), int(state["growth_interval"]))

    def skipped_since(self, earlier: LossScale, steps: int) -> int:
        """Return how many of ``steps`` steps were skipped since: exact for none, else the least that explains it.

        A scale that has fallen to 0 does not count its halvings: all steps but those since the last skip.
        """
        if not self.scale:
            return max(0, steps - self.unskipped)
        growths, unskipped = divmod(earlier.unskipped + steps, self.growth_interval)
        doublings = round(math.log2(self.scale / earlier.scale))
        if (doublings, self.unskipped) == (growths, unskipped):
            return 0
        return max(1, -doublings)
