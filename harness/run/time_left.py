"""An estimate of the time that a run still takes, for trials of unlike length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from harness.plan.planner import GROUP_START_S, Plan
from harness.plan.trial import Trial, WorkerGroup
from harness.run.events import Event, GroupReady, GroupStarting, TrialEnded, TrialStarting

Clock = Callable[[], float]
Key = tuple[str, ...]
MINUTE_S = 60.0
START: Key = ("start of a worker group",)


class TimeLeft:
    """The time left of a run, in seconds by ``clock``, from the durations of its trials so far; at most ``limit_s``.

    A trial is expected to take the mean of its cell's trials of the same kind; without any, that of all trials of its
    kind; without any, the least time that the plan knows, as do the starts of worker groups. Only successful trials
    count. A trial's duration includes what its group does between it and the one before.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Iterable[WorkerGroup],
        clock: Clock = time.monotonic,
        *,
        limit_s: float | None = None,
    ) -> None:
        self._plan, self._clock = plan, clock
        self._waiting: dict[str, set[str]] = {}
        self._pending: dict[str, Trial] = {}
        self._durations: dict[Key, tuple[float, int]] = {}  # sum and number
        self._last = clock()
        self._current: Trial | None = None
        self._starting = False
        self._said = -math.inf
        self._end = math.inf if limit_s is None else self._last + limit_s
        for group in groups:
            self._waiting[group.id] = {trial.id for trial in group.trials}
            self._pending |= {trial.id: trial for trial in group.trials}
        self._add_up()

    def follow(self, event: Event) -> None:
        """Take an event of the run into account."""
        match event:
            case GroupStarting(group):  # it began when the trial before it had ended
                self._waiting.pop(group.id, None)
                self._starting = True
            case GroupReady():
                if self._starting:  # under torchrun each of its trials reports anew
                    now = self._clock()
                    self._learn(START, now - self._last)
                    self._starting, self._last = False, now
            case TrialStarting(trial):
                self._current = trial
            case TrialEnded(trial, line, again):
                self._ended(trial, line["outcome"], again=again)
            case _:
                pass

    def _ended(self, trial: Trial, outcome: str, *, again: bool) -> None:
        now = self._clock()
        if outcome == "ok":
            for key in _keys(trial):
                self._learn(key, now - self._last)
        if outcome != "skipped":
            self._last, self._current, self._starting = now, None, False
        if not again:
            self._pending.pop(trial.id, None)
            for group, left in list(self._waiting.items()):
                left.discard(trial.id)
                if not left:  # it does not start any more
                    del self._waiting[group]
        self._add_up()

    @property
    def seconds(self) -> float:
        """The estimate now; at most what a limit leaves."""
        now, start = self._clock(), self._mean(START) or GROUP_START_S
        current = start if self._starting else self._expected(self._current) if self._current else 0.0
        left = self._rest + start * (self._starting + len(self._waiting)) - min(now - self._last, current)
        return max(0.0, min(left, self._end - now))

    @property
    def text(self) -> str:
        """The estimate as 'about 4 min left'; 'at least' if some kind of trial has not been measured yet, 'at most' if
        the intervals may need fewer blocks than planned; empty if nothing is left.
        """
        return f"{self._bound} {rounded(self.seconds)} left" if self._pending else ""

    def once_a_minute(self) -> str:
        """Return the estimate as text if it was not returned within the last minute; else nothing."""
        now = self._clock()
        if now - self._said < MINUTE_S:
            return ""
        self._said = now
        return self.text

    def _add_up(self) -> None:
        """Compute the time of all pending trials, and whether it is a bound; in between only the clock goes on."""
        pending = self._pending.values()
        self._rest = sum(map(self._expected, pending))
        unknown = any(_keys(trial)[-1] not in self._durations for trial in pending)
        settings = self._plan.experiment.throughput
        fewer = settings is not None and any(trial.block >= settings.least_blocks for trial in pending)
        self._bound = "about" if unknown == fewer else "at least" if unknown else "at most"

    def _expected(self, trial: Trial) -> float:
        of_cell, of_kind = _keys(trial)
        return self._mean(of_cell) or self._mean(of_kind) or self._plan.least_trial_seconds(trial)

    def _learn(self, key: Key, seconds: float) -> None:
        total, count = self._durations.get(key, (0.0, 0))
        self._durations[key] = total + seconds, count + 1

    def _mean(self, key: Key) -> float | None:
        total, count = self._durations.get(key, (0.0, 0))
        return total / count if count else None


def _keys(trial: Trial) -> tuple[Key, Key]:
    """Return what a trial's duration is known by: its cell and kind, and its kind."""
    kind = (trial.scenario, trial.cell.launcher)
    return (trial.cell.id, *kind), kind


def rounded(seconds: float) -> str:
    """Return '40 s', '7 min' or '2 h 10 min': seconds rounded up to ten seconds, a minute or ten minutes."""
    if seconds <= 90:
        return f"{max(10, 10 * math.ceil(seconds / 10))} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    minutes = 10 * math.ceil(minutes / 10)
    return f"{minutes // 60} h {minutes % 60:02d} min"
