"""The time that a run took by part, and what a planned trial is expected to take by an earlier run."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness.analysis.common import Lines, Row
from harness.analysis.published import hardware_of
from harness.config.experiment import Experiment
from harness.config.sections import Throughput
from harness.errors import HarnessError
from harness.plan.planner import least_warmup_s
from harness.plan.rows import RecordedTrial
from harness.plan.run_environment import RunEnvironment, wall_seconds
from harness.plan.trial import Trial, WorkerGroup
from harness.record.folder import RunFolder
from harness.record.reading import naming_file

CELL, TRAINING = "cell", "convergence"
GROUPS, COMMAND, REPORT = "worker groups", "command", "report"
Key = tuple[str, str]
"""(part, id of the cell or '')."""


@dataclass(frozen=True)
class Use:
    """The use of one part: its trials, their seconds, seconds times the devices that they occupied, and energy."""

    trials: int = 0
    seconds: float = 0.0
    device_s: float = 0.0
    energy_j: float | None = None

    def __add__(self, other: Use) -> Use:
        energies = [energy for energy in (self.energy_j, other.energy_j) if energy is not None]
        return Use(
            self.trials + other.trials,
            self.seconds + other.seconds,
            self.device_s + other.device_s,
            sum(energies) if energies else None,
        )


def key_of(row: Row) -> Key:
    """Return the part of a trial: its purpose if it has one, else its cell, convergence apart."""
    if row["purpose"]:
        return str(row["purpose"]), ""
    return TRAINING if row["kind"] == "convergence" else CELL, str(row["cell_id"])


def power_of(line: Row) -> float | None:
    """Return the mean power of one device of a trial in its timed windows, in watts; None without readings."""
    known = [rank["power_w"] for rank in line["ranks"] if rank.get("power_w") is not None]
    return fmean(known) if known else None


def time_use(lines: Lines, environment: RunEnvironment, devices: int | None = None) -> dict[Key, Use]:
    """Return the use of each part of a run: trials, what is outside of trials, of worker groups, recorded reports.

    A trial occupies at most ``devices``.
    """
    found: dict[Key, Use] = {}
    tries: dict[str, int] = {}
    for line in lines:
        if line["trial_s"] is None:
            continue
        tries[line["trial_id"]] = tries.get(line["trial_id"], 0) + 1
        seconds, occupied = float(line["trial_s"]), min(int(line["devices"]), devices or int(line["devices"]))
        power = power_of(line)
        energy = None if power is None else power * occupied * seconds
        use = Use(int(tries[line["trial_id"]] == 1), seconds, occupied * seconds, energy)
        found[key_of(line)] = found.get(key_of(line), Use()) + use
    last: dict[int, float] = {}
    for line in lines:
        end = float(line["started_at"] or 0.0) + float(line["trial_s"] or 0.0)
        last[int(line["invocation"])] = max(last.get(int(line["invocation"]), 0.0), end)
    in_trials = sum(use.seconds for use in found.values())
    in_groups = sum(group["whole_s"] for group in environment.get("groups", []))
    invocations = environment.get("invocations", [])
    wall = sum(wall_seconds(environment, number, last) for number in range(len(invocations)))
    found[GROUPS, ""] = Use(len(environment.get("groups", [])), max(0.0, in_groups - in_trials))
    found[COMMAND, ""] = Use(0, max(0.0, wall - in_groups))
    reports = [invocation["report_s"] for invocation in invocations if "report_s" in invocation]
    return {**found, (REPORT, ""): Use(0, sum(reports))} if reports else found


EXPLAINING = ("explain", "explaining steps", "phases")
TRAINING_PARTS = ("epochs", "evaluation", "checkpoints")


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
            factors |= {part: ratio for part in TRAINING_PARTS if part in self.parts}
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
    parts, steps, powers = [], [], []
    for line in lines:
        of_line = dict(line["parts"])
        rest = float(line["trial_s"]) - sum(of_line.values())
        parts.append({**of_line, "other": max(0.0, of_line.get("other", 0.0) + rest)})
        timed = [window for window in line["windows"] if window["window_kind"] == "timed" and window["rank"] == 0]
        if count := sum(window["steps"] for window in timed):
            steps.append(sum(window["duration_s"] for window in timed) / count)
        if (power := power_of(line)) is not None:
            powers.append(power)
    names = dict.fromkeys(part for of_line in parts for part in of_line)
    means = {name: sum(of_line.get(name, 0.0) for of_line in parts) / len(parts) for name in names}
    return TrialTime(means, fmean(steps) if steps else None, fmean(powers) if powers else None)


TrialKey = tuple[str | int, ...]


def keys_of_line(line: Row) -> list[TrialKey]:
    """Return the keys by which a recorded trial is found, the narrowest first."""
    purpose, timed = str(line["purpose"]), line["kind"] == "throughput" or line["purpose"] in ("twin", "explain")
    named = (str(line["cell_id"]), str(line["strategy"]), int(line["devices"]))
    return _keys(str(line["kind"]), purpose, *named, timed=timed)


def keys_of_trial(trial: Trial) -> list[TrialKey]:
    """Return the keys by which recorded trials like a planned one are found, the narrowest first."""
    cell = trial.cell
    return _keys(trial.kind, trial.purpose, cell.id, cell.strategy, cell.devices, timed=trial.timed)


def _keys(kind: str, purpose: str, cell_id: str, strategy: str, devices: int, *, timed: bool) -> list[TrialKey]:
    own: TrialKey = (purpose or kind, cell_id)
    if timed:
        return [own, ("timed", cell_id)]
    return [own, (purpose, strategy, devices), (purpose,)] if purpose else [own]


MOST_OPENED = 50
"""The most run folders, the newest first, that are searched for the cells of a plan."""


@dataclass(frozen=True)
class EarlierRun:
    """The times of a run: of trials by kind and cell, of worker groups outside of their trials, of the rest.

    ``groups``: the seconds of a worker group outside of its trials by placement, under torchrun those of each trial;
    ``hardware``: the models of its devices. None: not recorded.
    """

    path: Path
    started_at: float | None
    experiment: Experiment
    hardware: tuple[str, ...]
    trials: Mapping[TrialKey, TrialTime]
    groups: Mapping[str, float]
    command_s: float | None
    report_s: float | None

    def trial_time(self, trial: Trial) -> TrialTime | None:
        """Return the time of trials like this one; None if the run has none."""
        return next((self.trials[key] for key in keys_of_trial(trial) if key in self.trials), None)

    def group_s(self, group: WorkerGroup) -> float | None:
        """Return the seconds of such a worker group outside of its trials; of any group if none was placed alike."""
        known = self.groups.get(str(group))
        if known is None and self.groups:
            known = fmean(self.groups.values())
        return None if known is None else known * _starts(str(group), len(group.trials))


def earlier_run(folder: RunFolder) -> EarlierRun:
    """Return the times of the run in a folder; raises RunFolderError if it is damaged."""
    with naming_file(folder.path):  # what the tables are made from is validated, and no more
        folder.check()
        environment, lines = folder.environment(), folder.lines()
        invocations = environment.get("invocations", [])
        by_key: dict[TrialKey, list[Row]] = {}
        for line in lines:
            if line["outcome"] == "ok" and line["trial_s"] is not None:
                for key in keys_of_line(line):
                    by_key.setdefault(key, []).append(line)
        use = time_use(lines, environment)
        runs = sum("wall_s" in invocation for invocation in invocations)
        reports = sum("report_s" in invocation for invocation in invocations)
        return EarlierRun(
            folder.path,
            next((float(each["started_at"]) for each in invocations if "started_at" in each), None),
            folder.experiment(),
            tuple(hardware_of(environment)),
            {key: mean_time(rows) for key, rows in by_key.items()},
            _group_seconds(lines, environment),
            use[COMMAND, ""].seconds / runs if runs else None,
            use[REPORT, ""].seconds / reports if reports else None,
        )


def _group_seconds(lines: Collection[RecordedTrial], environment: RunEnvironment) -> dict[str, float]:
    """Return the mean seconds of worker groups outside of their trials by placement, of those that became ready."""
    inside: dict[tuple[int, str | None], list[float]] = {}
    for line in lines:
        if line["trial_s"] is not None:
            inside.setdefault((line["invocation"], line["group_id"]), []).append(line["trial_s"])
    found: dict[str, list[float]] = {}
    for group in environment.get("groups", []):
        trials = inside.get((group["invocation"], group["group_id"]), [])
        if trials:
            outside = max(0.0, group["whole_s"] - sum(trials)) / _starts(group["placement"], len(trials))
            found.setdefault(group["placement"], []).append(outside)
    return {placement: fmean(seconds) for placement, seconds in found.items()}


def _starts(placement: str, trials: int) -> int:
    """Return the number of starts of processes: one a group, or one a trial under torchrun."""
    return trials if " by torchrun" in placement else 1


def newest_with(cells: Collection[str], output: Path) -> EarlierRun | None:
    """Return the newest run below a folder that measured all of these cells, else the newest with most of them.

    None if no run has any. Damaged folders, and runs for a debugger, are passed over.
    """
    if not os.path.isdir(output):  # Path.glob raises for a name that is too long
        return None
    found = [plan.parent for plan in output.glob("*/*/plan.json") if not plan.parent.is_symlink()]
    # by the time in their names; others come last
    newest = sorted(found, key=lambda path: (path.name[:8].isdigit(), path.name), reverse=True)
    wanted = set(cells)
    best: tuple[int, EarlierRun | None] = 0, None
    for path in newest[:MOST_OPENED]:
        try:
            folder = RunFolder.open(path)
            lines = folder.trial_lines()
            ok = {line["cell_id"] for line in lines if line["outcome"] == "ok" and line["kind"] != "diagnostic"}
            if len(ok & wanted) > best[0] and not any(line["facts"].get("inline") for line in lines):
                best = len(ok & wanted), earlier_run(folder)
        except HarnessError:
            continue
        if best[0] == len(wanted):
            break
    return best[1]
