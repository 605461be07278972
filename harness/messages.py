"""What a worker group tells the driver, one message at a time. Plain values and arrays of them: no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.plan.trial import Row, TrialResult


@dataclass(frozen=True)
class GroupStarted:
    """The processes are up: one environment a node, and who runs where (one row a rank).

    ``parts``: seconds of coming up, by what they went to, as far as the launcher knows.
    """

    environments: tuple[Row, ...]
    ranks: tuple[Row, ...]
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialStarted:
    trial_id: str


Message = GroupStarted | TrialStarted | TrialResult
