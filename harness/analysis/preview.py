"""The estimate of a plan's time by part, from an earlier run or as a lower bound, and what a smaller study saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.analysis.common import order
from harness.analysis.earlier_run import EarlierRun
from harness.analysis.time_use import CELL, COMMAND, GROUPS, PURPOSES, REPORT, TRAINING
from harness.plan.comparison import axes_of
from harness.plan.labels import SEPARATOR
from harness.plan.planner import GROUP_START_S, TORCHRUN_START_S, Plan, keeping
from harness.plan.trial import Trial, WorkerGroup
from harness.record.estimate import Basis, Bound, Estimate, EstimatedPart

PART_LABELS = {
    "twin": "A/A test of the base",
    "explain": "cells that explain others",
    "profile": "profiles of collectives",
    "equivalence": "equivalence checks",
    "doctor": "preflight",
    "links": "links and collectives",
    GROUPS: "start and end of worker groups",
    COMMAND: "plan, Ray, records",
    REPORT: "report",
}
FEW_BLOCKS = 3
"""The fewest blocks that give an interval."""


def estimate_of(plan: Plan, earlier: EarlierRun | None) -> Estimate:
    """Return the time of each part of a plan, from an earlier run; without one, or for cells that it lacks, the least.

    The time of trainings without an earlier run is unknown: the number of their steps is known on the ranks alone.
    """
    parts = [_of_trials(plan, trials, earlier) for trials in _by_part(plan)]
    groups = _of_groups(plan.groups, earlier)
    command_s, report_s = (earlier.command_s, earlier.report_s) if earlier else (None, None)
    ends = [_outside(COMMAND, command_s), _outside(REPORT, report_s)]
    every = [*parts, groups, *ends] if plan.groups else []
    return {
        "earlier": str(earlier.path) if earlier else None,
        "devices": plan.machine.devices,
        "at_once": _at_once(plan),
        "bound": _bound(plan, every),
        "parts": every,
    }


def cell_label(label: str, kind: str) -> str:
    """Return the label of a cell as a part: its throughput, or its convergence."""
    return f"{label}{SEPARATOR}convergence" if kind == "convergence" else label


def _by_part(plan: Plan) -> list[list[Trial]]:
    """Return the trials of each cell in the order of tables, then those that the planner adds, by purpose."""
    cells: dict[tuple[bool, str], list[Trial]] = {}
    added: dict[str, list[Trial]] = {}
    for trial in plan.trials:
        if trial.purpose:
            added.setdefault(trial.purpose, []).append(trial)
        else:
            cells.setdefault((trial.kind == "convergence", trial.cell.id), []).append(trial)
    ordered = [cells[key] for key in sorted(cells, key=lambda key: (key[0], order(axes_of(cells[key][0].cell))))]
    return [*ordered, *(added[purpose] for purpose in PURPOSES if purpose in added)]


def _of_trials(plan: Plan, trials: Sequence[Trial], earlier: EarlierRun | None) -> EstimatedPart:
    first, devices = trials[0], plan.machine.devices
    seconds = device_s = energy_j = 0.0
    bases: set[Basis] = set()
    powered = True
    for trial in trials:
        time = earlier.trial_time(trial) if earlier else None
        if earlier and time:
            expected, basis = time.under(earlier.experiment, plan.experiment, trial.cell.device), _basis(earlier, plan)
        else:
            expected, basis = plan.least_trial_seconds(trial), _unmeasured(trial)
        bases.add(basis)
        occupied = min(trial.cell.devices, devices)
        seconds, device_s = seconds + expected, device_s + occupied * expected
        power_w = time.power_w if time else None
        powered = powered and power_w is not None
        energy_j += (power_w or 0.0) * occupied * expected
    unknown = bases == {"unknown"}
    return {
        "part": first.purpose or (TRAINING if first.kind == "convergence" else CELL),
        "cell_id": None if first.purpose else first.cell.id,
        "label": PART_LABELS[first.purpose]
        if first.purpose
        else cell_label(plan.labels.of_cell(first.cell), first.kind),
        "devices": None if first.purpose else first.cell.devices,
        "trials": len(trials),
        "seconds": None if unknown else seconds,
        "device_s": None if unknown else device_s,
        "energy_j": energy_j if powered else None,
        "basis": bases.pop() if len(bases) == 1 else "lower bound",
    }


def _basis(earlier: EarlierRun, plan: Plan) -> Basis:
    """Return a lower bound if the plan explains its trials and the earlier run did not."""
    return "lower bound" if plan.experiment.explains and not earlier.experiment.explains else "earlier run"


def _unmeasured(trial: Trial) -> Basis:
    return "unknown" if trial.kind == "convergence" else "lower bound"


def _of_groups(groups: Sequence[WorkerGroup], earlier: EarlierRun | None) -> EstimatedPart:
    known = [earlier.group_s(group) if earlier else None for group in groups]
    least = [TORCHRUN_START_S * len(g.trials) if g.launcher == "torchrun" else GROUP_START_S for g in groups]
    seconds = sum(one if one is not None else other for one, other in zip(known, least, strict=True))
    basis: Basis = "lower bound" if None in known else "earlier run"
    return {**_outside(GROUPS, seconds), "trials": len(groups), "basis": basis}


def _outside(part: str, seconds: float | None) -> EstimatedPart:
    return {
        "part": part,
        "cell_id": None,
        "label": PART_LABELS[part],
        "devices": None,
        "trials": 0,
        "seconds": seconds,
        "device_s": None if seconds is None else 0.0,
        "energy_j": None,
        "basis": "unknown" if seconds is None else "earlier run",
    }


def _bound(plan: Plan, parts: Iterable[EstimatedPart]) -> Bound:
    if any(part["basis"] == "lower bound" for part in parts):  # unknown parts are in no sum
        return "at least"
    timed = plan.experiment.throughput
    return "at most" if timed and timed.rule else "about"


def _at_once(plan: Plan) -> int:
    """Return the most devices that work at once: worker groups run one after the other."""
    most = max((group.placement.devices for group in plan.groups), default=0)
    return min(most, plan.machine.devices)


def total_seconds(estimate: Estimate) -> float:
    """Return the sum of the known parts."""
    return sum(part["seconds"] or 0.0 for part in estimate["parts"])


@dataclass(frozen=True)
class Saving:
    """A smaller study: what it leaves out, and the estimated seconds that it saves."""

    what: str
    seconds: float


def savings(plan: Plan, earlier: EarlierRun | None) -> list[Saving]:
    """Return what smaller studies save, estimated as the whole is: fewer blocks, without the largest size, one seed."""
    whole = total_seconds(estimate_of(plan, earlier))
    found = [
        Saving(what, whole - total_seconds(estimate_of(keeping(plan, wanted), earlier)))
        for what, wanted in _smaller(plan)
    ]
    return [saving for saving in found if saving.seconds > 0]


def _smaller(plan: Plan) -> list[tuple[str, Callable[[Trial], bool]]]:
    """Return the smaller studies of a plan: what each leaves out, and the trials that it keeps."""
    found: list[tuple[str, Callable[[Trial], bool]]] = []
    timed = [trial for trial in plan.trials if trial.kind == "throughput"]
    blocks = 1 + max((trial.block for trial in timed), default=0)  # of a resumed run with those that it has
    fewer = FEW_BLOCKS if blocks > FEW_BLOCKS else 1
    if blocks > fewer:
        what = f"{fewer} instead of {blocks} blocks{'' if fewer >= FEW_BLOCKS else ', without intervals'}"
        found.append((what, lambda trial: trial.kind == "convergence" or trial.block < fewer))
    sizes = sorted({trial.cell.devices for trial in plan.trials if not trial.added})  # without bases that it adds
    if len(sizes) > 1:
        found.append((f"no cells on {sizes[-1]} devices", lambda trial: trial.cell.devices < sizes[-1]))
    settings = plan.experiment.convergence
    if settings and len(settings.seeds) > 1 and any(trial.kind == "convergence" for trial in plan.trials):
        first = settings.seeds[0]
        one = f"1 instead of {len(settings.seeds)} seeds"
        found.append((one, lambda trial: trial.kind != "convergence" or trial.seed == first))
    return found
