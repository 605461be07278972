"""The attempts at each trial: how many were recorded, and whether another one is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from harness.plan.rows import Outcome


class Attempts:
    """Counts attempts. Only a lost trial is tried again, at most ``most`` times in one invocation.

    ``recorded``: the attempts of earlier invocations, which are numbered on but do not count against ``most``.
    """

    def __init__(self, recorded: Mapping[str, int], most: int) -> None:
        self._recorded = dict(recorded)
        self._most = most
        self._lost: dict[str, int] = {}
        self._settled: set[str] = set()

    @property
    def total(self) -> int:
        """The number of attempts at all trials."""
        return sum(self._recorded.values())

    def next_number(self, trial_id: str) -> int:
        """Return the number of the next attempt at a trial, from 1."""
        return self._recorded.get(trial_id, 0) + 1

    def add(self, trial_id: str, outcome: Outcome) -> None:
        """Count an attempt with its outcome."""
        self._recorded[trial_id] = self.next_number(trial_id)
        self._lost[trial_id] = self._lost.get(trial_id, 0) + (outcome == "lost")
        if outcome != "lost" or self._lost[trial_id] >= self._most:
            self._settled.add(trial_id)

    def is_settled(self, trial_id: str) -> bool:
        """Return whether the trial needs no further attempt in this invocation."""
        return trial_id in self._settled
