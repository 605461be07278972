"""The time that a run took by part: its cells, its diagnostic trials by kind, and what is outside of trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from harness.analysis.common import Lines, Row
from harness.plan.budget import wall_seconds
from harness.plan.environment import RunEnvironment
from harness.plan.rows import Purpose

CELL, TRAINING = "cell", "convergence"
GROUPS, COMMAND, REPORT = "worker groups", "command", "report"
PURPOSES: tuple[Purpose, ...] = ("twin", "explain", "profile", "equivalence", "doctor", "links")
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
    """Return the use of each part of a run; the report's if it is recorded. A trial occupies at most ``devices``."""
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
    in_trials = sum(use.seconds for use in found.values())
    in_groups = sum(group["whole_s"] for group in environment.get("groups", []))
    last: dict[int, float] = {}
    for line in lines:
        end = float(line["started_at"] or 0.0) + float(line["trial_s"] or 0.0)
        last[int(line["invocation"])] = max(last.get(int(line["invocation"]), 0.0), end)
    return found | _outside(environment, last, in_trials, in_groups)


def _outside(
    environment: RunEnvironment, last: Mapping[int, float], in_trials: float, in_groups: float
) -> dict[Key, Use]:
    """Return the time outside of trials, outside of worker groups, and of the reports."""
    invocations = environment.get("invocations", [])
    wall = sum(wall_seconds(environment, number, last) for number in range(len(invocations)))
    groups = len(environment.get("groups", []))
    found = {
        (GROUPS, ""): Use(groups, max(0.0, in_groups - in_trials)),
        (COMMAND, ""): Use(0, max(0.0, wall - in_groups)),
    }
    reports = [invocation["report_s"] for invocation in invocations if "report_s" in invocation]
    return {**found, (REPORT, ""): Use(0, sum(reports))} if reports else found
