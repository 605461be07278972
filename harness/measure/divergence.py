"""Divergence: the step and rank at which a training stopped being finite, and the last losses before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = 5
"""Number of finite losses that are reported."""


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
    return Divergence(
        rank, steps_before + place + 1, float(seen[place]), tuple(seen[max(0, place - KEPT) : place].tolist())
    )


def earliest(found: Iterable[Divergence | None]) -> Divergence | None:
    """Return the earliest of the ranks' divergences; None if there is none."""
    seen = [one for one in found if one]
    return min(seen, key=lambda one: (one.step or math.inf, one.rank), default=None)


def outcome_columns(divergence: Divergence | None, facts: Mapping[str, Any]) -> dict[str, Any]:
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
