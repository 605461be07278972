"""What a worker group tells the driver, one message at a time. Plain values and arrays of them: no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

Outcome = Literal["ok", "oom", "diverged", "error", "timeout", "lost", "skipped"]
PRECISE = "precise enough"
"""How the reason begins of a trial that its cell's interval no longer needs."""
PREFLIGHT = "preflight"
"""The same of a trial that the doctor's findings forbid."""
TIME_IS_UP = "time is up: limits.wall was reached"
"""The reason of a trial that was not started for want of time."""
PRUNED = "of the same cell ran out of memory (limits.prune_oom)"
"""How the reason ends of a trial that would need no less memory than one that ran out of it."""
Row = Mapping[str, Any]
Columns = Mapping[str, Sequence[Any] | npt.NDArray[Any]]


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


@dataclass(frozen=True)
class TrialResult:
    """What became of a trial. Times are in seconds; ``steps`` and ``epochs`` hold every rank's rows.

    ``trial_s`` is the trial's whole time inside its worker group, ``steps_s`` the part of it that was
    in steps, of whatever kind, ``parts`` all of it by what it went to, all on rank 0. ``facts`` are
    further columns of the trial's row; ``checks`` is the update that an equivalence check compares.
    """

    trial_id: str
    outcome: Outcome
    reason: str = ""
    error_type: str | None = None
    error_rank: int | None = None
    detail: str = ""
    started_at: float | None = None
    trial_s: float | None = None
    steps_s: float | None = None
    unit: str | None = None
    parameters: int | None = None
    facts: Row = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[Row, ...] = ()
    windows: tuple[Row, ...] = ()
    steps: Columns = field(default_factory=dict)
    epochs: Columns = field(default_factory=dict)
    checks: Columns = field(default_factory=dict)

    @property
    def ends_group(self) -> bool:
        """Whether its processes are no good for a further trial."""
        return self.outcome not in ("ok", "diverged", "skipped")


Message = GroupStarted | TrialStarted | TrialResult
