"""The limits that end a run: its wall time, its device-hours and its cost, of which the first one counts.

A device-hour is one device of the machine for an hour, whether it works or waits: so a cluster is billed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.config.experiment import Experiment
from harness.plan.environment import RunEnvironment

HOUR_S = 3600.0


@dataclass(frozen=True)
class End:
    """A limit by its name in the experiment file, its value, and the seconds until it ends the run."""

    name: str
    limit: str
    seconds: float

    @property
    def reason(self) -> str:
        """The reason of the trials that it leaves out."""
        return f"time is up: {self.name} was reached{self.limit}"


def end_of(experiment: Experiment, devices: int, spent_device_s: float = 0.0) -> End | None:
    """Return the limit that ends a run first, from now on; None without a limit.

    ``devices``: of the machine; ``spent_device_s``: the device-seconds of the run so far, earlier invocations included.
    The wall time is that of one invocation. Device-hours and cost are those of the whole run: a resume adds none.
    """
    limits, cost = experiment.limits, experiment.cost
    ends = [End("limits.wall", "", limits.wall)] if limits.wall else []
    hours: dict[str, tuple[float, str]] = {}
    if limits.device_hours:
        hours["limits.device_hours"] = limits.device_hours, f"{limits.device_hours:g}"
    if limits.cost and cost:
        hours["limits.cost"] = limits.cost / cost.per_device_hour, f"{limits.cost:g} {cost.currency}"
    ends += [
        End(name, f" ({text} of the whole run; raise it to go on)", (most * HOUR_S - spent_device_s) / max(1, devices))
        for name, (most, text) in hours.items()
    ]
    return min(ends, key=lambda end: end.seconds, default=None)


def spent_device_seconds(environment: RunEnvironment, last_record: Mapping[int, float], devices: int) -> float:
    """Return the device-seconds of the recorded invocations of a run.

    ``last_record``: by invocation, the Unix time of its last recorded trial, for killed ones. ``devices``: those
    of the machine, for invocations that did not record their number.
    """
    spent = 0.0
    for number, invocation in enumerate(environment.get("invocations", [])):
        spent += wall_seconds(environment, number, last_record) * invocation.get("devices", devices)
    return spent


def wall_seconds(environment: RunEnvironment, number: int, last_record: Mapping[int, float]) -> float:
    """Return the wall time of an invocation until its report; of a killed one until its last record."""
    invocation = environment.get("invocations", [])[number]
    if "wall_s" in invocation:
        return invocation["wall_s"]
    groups = [g for g in environment.get("groups", []) if g["invocation"] == number]
    ends = [last_record.get(number, 0.0), *(group["started_at"] + group["whole_s"] for group in groups)]
    return max(0.0, max(ends) - invocation.get("started_at", max(ends)))
