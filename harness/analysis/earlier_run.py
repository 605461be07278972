"""The times of an earlier run, from which those of a planned one are estimated: the newest one that has its cells."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness.analysis.common import Row
from harness.analysis.published import hardware_of
from harness.analysis.time_use import COMMAND, REPORT, time_use
from harness.analysis.trial_time import TrialKey, TrialTime, keys_of_line, keys_of_trial, mean_time
from harness.config.experiment import Experiment
from harness.errors import HarnessError
from harness.plan.environment import RunEnvironment
from harness.plan.rows import RecordedTrial
from harness.plan.trial import Trial, WorkerGroup
from harness.record.folder import RunFolder
from harness.record.reading import naming_file

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
        return _times(folder)


def _times(folder: RunFolder) -> EarlierRun:
    folder.check()
    environment = folder.environment()
    lines = folder.lines()
    ok = [line for line in lines if line["outcome"] == "ok" and line["trial_s"] is not None]
    by_key: dict[TrialKey, list[Row]] = {}
    for line in ok:
        for key in keys_of_line(line):
            by_key.setdefault(key, []).append(line)
    use = time_use(lines, environment)
    runs = sum("wall_s" in invocation for invocation in environment.get("invocations", []))
    reports = sum("report_s" in invocation for invocation in environment.get("invocations", []))
    return EarlierRun(
        folder.path,
        next((float(each["started_at"]) for each in environment.get("invocations", []) if "started_at" in each), None),
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
    best: tuple[int, EarlierRun | None] = 0, None
    for path in _newest_first(output)[:MOST_OPENED]:
        try:
            folder = RunFolder.open(path)
            has = len(_measured_cells(folder) & set(cells))
            if has > best[0]:
                best = has, earlier_run(folder)
        except HarnessError:
            continue
        if best[0] == len(set(cells)):
            break
    return best[1]


def _newest_first(output: Path) -> list[Path]:
    """Return what may be run folders in a folder of experiments, by the time in their names; others come last."""
    if not os.path.isdir(output):
        return []
    found = [plan.parent for plan in output.glob("*/*/plan.json") if not plan.parent.is_symlink()]
    return sorted(found, key=lambda path: (path.name[:8].isdigit(), path.name), reverse=True)


def _measured_cells(folder: RunFolder) -> set[str]:
    lines = folder.lines()
    if any(line["facts"].get("inline") for line in lines):
        return set()
    return {line["cell_id"] for line in lines if line["outcome"] == "ok" and line["kind"] != "diagnostic"}
