"""The expected time of a trial, from trials of an earlier run, whose windows and epochs may have been of other size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from harness.analysis.common import Row
from harness.config.experiment import Experiment
from harness.config.sections import Throughput
from harness.plan.planner import least_warmup_s
from harness.plan.trial import Trial

EXPLAINING = ("explain", "explaining steps", "phases")
TRAINING = ("epochs", "evaluation", "checkpoints")


@dataclass(frozen=True)
class TrialTime:
    """The mean time of like trials by part, their step time and the power of one device, None if it is not known."""

    parts: Mapping[str, float]
    step_s: float | None = None
    power_w: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def under(self, then: Experiment, now: Experiment, device: str) -> float:
        """Return the seconds of such a trial under the settings of another experiment: windows, warm-up, epochs.

        ``device``: 'cpu' or 'cuda', on which the default warm-up depends.
        """
        factors = dict.fromkeys(self.parts, 1.0)
        if then.throughput and now.throughput and then.throughput != now.throughput:
            factors |= self._timed_factors(then.throughput, now.throughput, device)
        if then.convergence and now.convergence:
            ratio = now.convergence.epochs / then.convergence.epochs
            factors |= {part: ratio for part in TRAINING if part in self.parts}
        return sum(seconds * factors[part] for part, seconds in self.parts.items())

    def _timed_factors(self, then: Throughput, now: Throughput, device: str) -> dict[str, float]:
        step_s = self.step_s or 0.0
        windows = now.windows * _window_s(now, step_s) / (then.windows * _window_s(then, step_s) or 1.0)
        warmup = max(now.warmup_steps * step_s, least_warmup_s(now, device))
        before = max(then.warmup_steps * step_s, least_warmup_s(then, device))
        factors = {"windows": windows, "warmup": warmup / before if before else 1.0}
        if then.explain and not now.explain:
            factors |= dict.fromkeys(EXPLAINING[:2], 0.0)
        if then.links_seconds and now.links_seconds is not None:
            factors["links"] = now.links_seconds / then.links_seconds
        return {part: factor for part, factor in factors.items() if part in self.parts}


def _window_s(settings: Throughput, step_s: float) -> float:
    """Return the seconds of a window: whole steps, at least ``window_steps`` and at least ``window_seconds``."""
    if not step_s:
        return settings.window_seconds
    return step_s * max(settings.window_steps, math.ceil(settings.window_seconds / step_s))


def mean_time(lines: Iterable[Row]) -> TrialTime:
    """Return the mean time of recorded trials, of which there is at least one."""
    rows = [_time_of(line) for line in lines]
    names = dict.fromkeys(part for row in rows for part in row.parts)
    parts = {name: sum(row.parts.get(name, 0.0) for row in rows) / len(rows) for name in names}
    steps = [row.step_s for row in rows if row.step_s is not None]
    powers = [row.power_w for row in rows if row.power_w is not None]
    return TrialTime(parts, fmean(steps) if steps else None, fmean(powers) if powers else None)


def _time_of(line: Row) -> TrialTime:
    from harness.analysis.time_use import power_of

    timed = [window for window in line["windows"] if window["window_kind"] == "timed" and window["rank"] == 0]
    steps = sum(window["steps"] for window in timed)
    step_s = sum(window["duration_s"] for window in timed) / steps if steps else None
    parts = dict(line["parts"])
    rest = float(line["trial_s"]) - sum(parts.values())
    return TrialTime({**parts, "other": max(0.0, parts.get("other", 0.0) + rest)}, step_s, power_of(line))


TrialKey = tuple[str | int, ...]


def keys_of_line(line: Row) -> list[TrialKey]:
    """Return the keys by which a recorded trial is found, the narrowest first."""
    purpose, timed = str(line["purpose"]), line["kind"] == "throughput" or line["purpose"] in ("twin", "explain")
    named = (str(line["cell_id"]), str(line["strategy"]), int(line["devices"]))
    return _keys(str(line["kind"]), purpose, *named, timed=timed)


def keys_of_trial(trial: Trial) -> list[TrialKey]:
    """Return the keys of a planned trial: like trials of its cell, of its kind of cells, of its purpose."""
    cell = trial.cell
    return _keys(trial.kind, trial.purpose, cell.id, cell.strategy, cell.devices, timed=trial.timed)


def _keys(kind: str, purpose: str, cell_id: str, strategy: str, devices: int, *, timed: bool) -> list[TrialKey]:
    own: TrialKey = (purpose or kind, cell_id)
    if timed:
        return [own, ("timed", cell_id)]
    return [own, (purpose, strategy, devices), (purpose,)] if purpose else [own]
