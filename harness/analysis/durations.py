"""How long trials and the starts of worker groups take, by what an earlier run or the run so far has recorded."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from harness.analysis.common import AnyRow
from harness.analysis.published import hardware_of
from harness.config.experiment import Experiment
from harness.config.sections import Throughput
from harness.errors import HarnessError
from harness.plan.planner import GROUP_START_S, Plan, least_warmup_s
from harness.plan.run_environment import wall_seconds
from harness.plan.trial import TIMED, Trial, WorkerGroup
from harness.record.folder import RunFolder
from harness.record.reading import naming_file

TRAINING_PARTS = ("epochs", "evaluation", "checkpoints")


def power_of(line: AnyRow) -> float | None:
    """Return the mean power of one device of a trial in its timed windows, in watts; None without readings."""
    return _mean([rank.get("power_w") for rank in line["ranks"]])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


@dataclass(frozen=True)
class TrialTime:
    """The time of a trial, or the mean of like trials, by part; its step time and the power of one device, if known."""

    parts: Mapping[str, float]
    step_s: float | None = None
    power_w: float | None = None

    @classmethod
    def of_line(cls, line: AnyRow) -> TrialTime:
        """Return the time of a recorded trial; what no part holds is its part 'other'."""
        parts = dict(line["parts"])
        rest = float(line["trial_s"]) - sum(parts.values())
        timed = [window for window in line["windows"] if window["window_kind"] == "timed" and window["rank"] == 0]
        steps = sum(window["steps"] for window in timed)
        step_s = sum(window["duration_s"] for window in timed) / steps if steps else None
        return cls({**parts, "other": max(0.0, parts.get("other", 0.0) + rest)}, step_s, power_of(line))

    @classmethod
    def mean(cls, times: Sequence[TrialTime]) -> TrialTime:
        """Return the mean of at least one time; a part that a trial lacks took it no time."""
        names = dict.fromkeys(name for time in times for name in time.parts)
        means = {name: sum(time.parts.get(name, 0.0) for time in times) / len(times) for name in names}
        return cls(means, _mean(time.step_s for time in times), _mean(time.power_w for time in times))

    def under(self, then: Experiment, now: Experiment, device: str) -> float:
        """Return the seconds of such a trial under the settings of another experiment: windows, warm-up, epochs.

        ``device``: 'cpu' or 'cuda', on which the default warm-up depends.
        """
        factors: dict[str, float] = {}
        if then.throughput and now.throughput and then.throughput != now.throughput:
            factors = self._timed_factors(then.throughput, now.throughput, device)
        trained = [settings.convergence for settings in (then, now)]
        for length in ("epochs", "steps"):
            before, after = (getattr(settings, length, None) for settings in trained)
            if before and after:
                factors |= dict.fromkeys(TRAINING_PARTS, after / before)
        return sum(seconds * factors.get(part, 1.0) for part, seconds in self.parts.items())

    def _timed_factors(self, then: Throughput, now: Throughput, device: str) -> dict[str, float]:
        step_s = self.step_s or 0.0
        windows = now.windows * _window_s(now, step_s) / (then.windows * _window_s(then, step_s) or 1.0)
        warmup = max(now.warmup_steps * step_s, least_warmup_s(now, device))
        before = max(then.warmup_steps * step_s, least_warmup_s(then, device))
        factors = {"windows": windows, "warmup": warmup / before if before else 1.0}
        if then.explain and not now.explain:
            factors |= dict.fromkeys(("explain", "explaining steps"), 0.0)
        if then.links_seconds and now.links_seconds is not None:
            factors["links"] = now.links_seconds / then.links_seconds
        return factors


def _window_s(settings: Throughput, step_s: float) -> float:
    """Return the seconds of a window: whole steps, at least ``window_steps`` and at least ``window_seconds``."""
    if not step_s:
        return settings.window_seconds
    return step_s * max(settings.window_steps, math.ceil(settings.window_seconds / step_s))


Key = tuple[str | int, ...]
Keys = tuple[tuple[Key, ...], tuple[Key, ...]]
"""What the duration of a trial is known by, the narrowest first: as one of its cell, and as one of its kind."""


def _keys(kind: str, purpose: str, cell_id: str, strategy: str, devices: int, launcher: str) -> Keys:
    timed = kind == "throughput" or purpose in TIMED
    scenario = "timed" if timed else purpose or kind
    return ((purpose or kind, cell_id), (scenario, cell_id)), ((scenario, strategy, devices), (scenario, launcher))


def _keys_of(trial: Trial) -> Keys:
    cell = trial.cell
    return _keys(trial.kind, trial.purpose, cell.id, cell.strategy, cell.devices, cell.launcher)


class Expected(NamedTuple):
    """The expected duration of a trial, or of the start and end of a worker group; if not known, the least."""

    seconds: float
    is_known: bool
    power_w: float | None = None


class Durations:
    """The durations of successful trials, and of the starts and ends of worker groups, to expect others by.

    ``experiment``: the one that they were recorded under; None: the one that is planned.
    """

    def __init__(self, experiment: Experiment | None = None) -> None:
        self.experiment = experiment
        self._times: dict[Key, list[TrialTime]] = {}
        self._means: dict[Key, TrialTime] = {}
        self._starts: dict[str, list[float]] = {}

    def add_line(self, line: AnyRow) -> None:
        """Add a recorded trial."""
        names = ("kind", "purpose", "cell_id", "strategy", "devices", "launcher")
        self._add(_keys(*(line[name] for name in names)), TrialTime.of_line(line))

    def add(self, trial: Trial, time: TrialTime) -> None:
        """Add a trial of the plan."""
        self._add(_keys_of(trial), time)

    def _add(self, keys: Keys, time: TrialTime) -> None:
        for key in {*keys[0], *keys[1]}:
            self._times.setdefault(key, []).append(time)
            self._means.pop(key, None)

    def add_start(self, placement: str, seconds: float) -> None:
        """Add the seconds that a worker group took outside of its trials; ``placement``: the group as text."""
        self._starts.setdefault(placement, []).append(seconds)

    def trial(self, trial: Trial, plan: Plan, *, by_kind: bool) -> Expected:
        """Return the duration of a trial of a plan: the mean of its cell or, with ``by_kind``, else of its kind."""
        of_cell, of_kind = _keys_of(trial)
        for key in (*of_cell, *(of_kind if by_kind else ())):
            if key in self._times:
                if key not in self._means:
                    self._means[key] = TrialTime.mean(self._times[key])
                mean, then = self._means[key], self.experiment
                seconds = mean.under(then, plan.experiment, trial.cell.device) if then else sum(mean.parts.values())
                return Expected(seconds, True, mean.power_w)
        return Expected(plan.least_trial_seconds(trial), False)

    def start(self, group: WorkerGroup) -> Expected:
        """Return the seconds of a worker group outside of its trials: the mean of its placement, else of all."""
        if not self._starts:
            return Expected(GROUP_START_S[group.launcher], False)
        return Expected(fmean(self._starts.get(str(group)) or map(fmean, self._starts.values())), True)


@dataclass(frozen=True)
class TimedRun:
    """A recorded run: the durations of its trials and groups, and what it took outside of them; None: not recorded.

    ``hardware``: the models of its devices.
    """

    path: Path
    started_at: float | None
    hardware: tuple[str, ...]
    durations: Durations
    command_s: float | None
    report_s: float | None


def timed_run(folder: RunFolder) -> TimedRun:
    """Return the times of the run in a folder; raises RunFolderError if it is damaged."""
    with naming_file(folder.path):  # what the tables are made from is validated, and no more
        folder.check()
        environment, lines = folder.environment(), folder.lines()
        invocations, groups = environment.get("invocations", []), environment.get("groups", [])
        durations = Durations(folder.experiment())
        inside: dict[tuple[int, str | None], list[float]] = {}
        for line in lines:
            if line["trial_s"] is not None:
                inside.setdefault((line["invocation"], line["group_id"]), []).append(line["trial_s"])
                if line["outcome"] == "ok":
                    durations.add_line(line)
        for group in groups:
            if trials := inside.get((group["invocation"], group["group_id"])):  # else it did not become ready
                durations.add_start(group["placement"], max(0.0, group["whole_s"] - sum(trials)))
        outside_s = max(0.0, sum(wall_seconds(environment, lines)) - sum(group["whole_s"] for group in groups))
        ended = sum("wall_s" in invocation for invocation in invocations)
        return TimedRun(
            folder.path,
            next((float(each["started_at"]) for each in invocations if "started_at" in each), None),
            tuple(hardware_of(environment)),
            durations,
            outside_s / ended if ended else None,
            _mean(invocation.get("report_s") for invocation in invocations),
        )


MOST_OPENED = 50
"""The most run folders, the newest first, that are searched for the cells of a plan."""


def newest_with(cells: Collection[str], output: Path) -> TimedRun | None:
    """Return the newest run below a folder that measured all of these cells, else the newest with most of them.

    None if no run has any. Damaged folders, and runs for a debugger, are passed over.
    """
    if not os.path.isdir(output):  # Path.glob raises for a name that is too long
        return None
    found = [plan.parent for plan in output.glob("*/*/plan.json") if not plan.parent.is_symlink()]
    # by the time in their names; others come last
    newest = sorted(found, key=lambda path: (path.name[:8].isdigit(), path.name), reverse=True)
    wanted = set(cells)
    best: tuple[int, TimedRun | None] = 0, None
    for path in newest[:MOST_OPENED]:
        try:
            folder = RunFolder.open(path)
            lines = folder.trial_lines()
            ok = {line["cell_id"] for line in lines if line["outcome"] == "ok" and line["kind"] != "diagnostic"}
            if len(ok & wanted) > best[0] and not any(line["facts"].get("inline") for line in lines):
                best = len(ok & wanted), timed_run(folder)
        except HarnessError:
            continue
        if best[0] == len(wanted):
            break
    return best[1]
