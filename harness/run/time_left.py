"""An estimate of the time that a run still takes, for trials of unlike length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from harness.analysis.durations import Durations, TrialTime
from harness.plan.planner import Plan
from harness.plan.trial import Trial, WorkerGroup
from harness.run.events import Event, GroupReady, GroupStarting, TrialEnded, TrialStarting

MINUTE_S = 60.0


class TimeLeft:
    """The time left of a run, in seconds by ``clock``, from the durations of its trials so far; at most ``limit_s``.

    Only successful trials count. A trial's duration includes what its group does between it and the one before.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Iterable[WorkerGroup],
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_s: float | None = None,
    ) -> None:
        self._plan, self._clock = plan, clock
        self._durations = Durations()
        self._waiting: dict[str, WorkerGroup] = {}
        self._pending: dict[str, Trial] = {}
        self._last = clock()
        self._current: Trial | None = None
        self._starting: WorkerGroup | None = None
        self._said = -math.inf
        self._end = math.inf if limit_s is None else self._last + limit_s
        for group in groups:
            self._waiting[group.id] = group
            self._pending |= {trial.id: trial for trial in group.trials}
        self._add_up()

    def follow(self, event: Event) -> None:
        """Take an event of the run into account."""
        match event:
            case GroupStarting(group):  # it began when the trial before it had ended
                self._waiting.pop(group.id, None)
                self._starting = group
                self._add_up()
            case GroupReady():
                if self._starting:
                    now = self._clock()
                    self._durations.add_start(str(self._starting), now - self._last)
                    self._starting, self._last = None, now
                    self._add_up()
            case TrialStarting(trial):
                self._current = trial
            case TrialEnded(trial, line, again):
                self._ended(trial, line["outcome"], again=again)
            case _:
                pass

    def _ended(self, trial: Trial, outcome: str, *, again: bool) -> None:
        now = self._clock()
        if outcome == "ok":
            self._durations.add(trial, TrialTime({"other": now - self._last}))
        if outcome != "skipped":
            self._last, self._current, self._starting = now, None, None
        if not again:
            self._pending.pop(trial.id, None)
            waiting = self._waiting.items()  # a group without trials does not start any more
            self._waiting = {key: group for key, group in waiting if any(t.id in self._pending for t in group.trials)}
        self._add_up()

    @property
    def seconds(self) -> float:
        """The estimate now; at most what a limit leaves."""
        now, current = self._clock(), 0.0
        if self._starting:
            current = self._durations.start(self._starting).seconds
        elif self._current:
            current = self._durations.trial(self._current, self._plan, by_kind=True).seconds
        left = self._rest + current * bool(self._starting) - min(now - self._last, current)
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
        """Compute the time of all that has not begun, and whether it is a bound; in between only the clock goes on."""
        pending = self._pending.values()
        trials = [self._durations.trial(trial, self._plan, by_kind=True) for trial in pending]
        starts = [self._durations.start(group) for group in self._waiting.values()]
        self._rest = sum(each.seconds for each in (*trials, *starts))
        unknown = not all(trial.is_known for trial in trials)
        settings = self._plan.experiment.throughput
        fewer = settings is not None and any(trial.block >= settings.least_blocks for trial in pending)
        self._bound = "about" if unknown == fewer else "at least" if unknown else "at most"


def rounded(seconds: float) -> str:
    """Return '40 s', '7 min' or '2 h 10 min': seconds rounded up to ten seconds, a minute or ten minutes."""
    if seconds <= 90:
        return f"{max(10, 10 * math.ceil(seconds / 10))} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    minutes = 10 * math.ceil(minutes / 10)
    return f"{minutes // 60} h {minutes % 60:02d} min"
