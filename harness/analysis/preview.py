"""The estimate of a plan's time by part, and the run that followed: time, device-hours, cost, energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import pandas as pd

from harness.analysis.common import Lines, Row, order
from harness.analysis.durations import (
    CELL,
    COMMAND,
    GROUPS,
    REPORT,
    TRAINING,
    EarlierRun,
    Key,
    Use,
    key_of,
    time_use,
)
from harness.analysis.trials import labels_of
from harness.config.sections import Cost
from harness.config.values import MAX_DEVICES
from harness.plan.comparison import axes_of
from harness.plan.feasibility import HOUR_S
from harness.plan.labels import SEPARATOR
from harness.plan.planner import GROUP_START_S, TORCHRUN_START_S, Plan, keeping
from harness.plan.run_environment import RunEnvironment
from harness.plan.trial import PURPOSES, Trial, WorkerGroup
from harness.record.estimate import Basis, Bound, Estimate, EstimatedPart
from harness.record.schema import PREVIEW

PART_LABELS: Mapping[str, str] = {
    **{name: traits.label for name, traits in PURPOSES.items()},
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
    most = max((group.placement.devices for group in plan.groups), default=0)  # groups run one after the other
    return {
        "earlier": str(earlier.path) if earlier else None,
        "devices": plan.machine.devices,
        "at_once": min(most, plan.machine.devices),
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
    basis: Basis
    powered = True
    for trial in trials:
        time = earlier.trial_time(trial) if earlier else None
        if earlier and time:
            expected = time.under(earlier.experiment, plan.experiment, trial.cell.device)
            explains_more = plan.experiment.explains and not earlier.experiment.explains
            basis = "lower bound" if explains_more else "earlier run"
        else:
            expected = plan.least_trial_seconds(trial)
            basis = "unknown" if trial.kind == "convergence" else "lower bound"
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


MEASUREMENT, TOTAL = "measurement", "total"
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Part:
    """One row: a part of the run, and what it takes, estimated and actual; None if that is not known."""

    part: str
    cell_id: str | None
    label: str
    devices: int | None
    basis: Basis | None
    estimated: Use | None
    actual: Use | None


def preview(
    estimate: Estimate | None,
    devices: int | None,
    cost: Cost | None,
    lines: Lines = (),
    environment: RunEnvironment | None = None,
    fits: Mapping[str, str] = MappingProxyType({}),
) -> pd.DataFrame:
    """Return the estimate of a run beside what was recorded of it; of a run without an estimate the latter alone.

    ``devices``: of the machine, None if their number is not recorded. Without an environment there was no run.
    ``fits``: whether cells fit into memory, by their id.
    """
    actual = {} if environment is None else time_use(lines, environment, devices)
    estimated = estimate["parts"] if estimate else []
    parts = [_part(each, actual.get((each["part"], each["cell_id"] or ""))) for each in estimated]
    known = {(part.part, part.cell_id or "") for part in parts}
    parts += _unexpected({key: use for key, use in actual.items() if key not in known}, lines)
    places = [CELL, TRAINING, *PURPOSES, GROUPS, COMMAND, REPORT]
    parts.sort(key=lambda part: places.index(part.part))  # stable: cells stay in their order
    once = environment is not None and len(environment.get("invocations", [])) == 1
    rows = (_row(part, devices, cost, once=once) for part in _with_sums(parts))
    return PREVIEW.frame({**row, "fits": fits.get(str(row["cell_id"]))} for row in rows)


def machine_devices(plan: Row) -> int | None:
    """Return the number of devices of the machine of a plan.json; None if it is not recorded."""
    machine = plan.get("machine")
    counts = machine.get("devices_per_node") if isinstance(machine, dict) else None
    known = isinstance(counts, list) and all(isinstance(count, int) and 0 <= count <= MAX_DEVICES for count in counts)
    return sum(counts) if counts and known else None


def _part(known: EstimatedPart, actual: Use | None) -> Part:
    seconds, device_s = known["seconds"], known["device_s"]
    unknown = seconds is None or device_s is None
    estimated = None if unknown else Use(known["trials"], seconds or 0.0, device_s or 0.0, known["energy_j"])
    return Part(known["part"], known["cell_id"], known["label"], known["devices"], known["basis"], estimated, actual)


def _unexpected(uses: Mapping[Key, Use], lines: Lines) -> list[Part]:
    """Return the parts of which there was no estimate, cells in the order of tables."""
    labels = labels_of(lines)
    cells = {key_of(line): line for line in lines if not line["purpose"]}
    return [
        Part(
            part=key[0],
            cell_id=key[1] or None,
            label=cell_label(labels.of(cells[key]), cells[key]["kind"]) if key in cells else PART_LABELS[key[0]],
            devices=int(cells[key]["devices"]) if key in cells else None,
            basis=None,
            estimated=None,
            actual=uses[key],
        )
        for key in sorted(uses, key=lambda key: order(cells[key]) if key in cells else ())
    ]


def _with_sums(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with the sum of all but the report after them, then the report, then the sum of both.

    A report does not know its own time: it stands there once the command has written it.
    """
    if not parts:
        return []
    report = [part for part in parts if part.part == REPORT]
    measured = [part for part in parts if part.part != REPORT]
    total = _sum(TOTAL, "total", parts)
    reported = any(part.actual for part in report)
    return [
        *measured,
        _sum(MEASUREMENT, "until the report", measured),
        *report,
        total if reported else replace(total, actual=None),
    ]


def _sum(name: str, label: str, parts: Sequence[Part]) -> Part:
    """Return the sum of what is known; its trials are those of all parts but worker groups."""
    bases = {part.basis for part in parts}
    basis: Basis | None = None if bases == {None} else "lower bound"
    if bases <= {"earlier run", "unknown"}:
        basis = "unknown" if "unknown" in bases else "earlier run"
    sums: list[Use | None] = []
    for side in ("estimated", "actual"):
        uses = [(part.part, use) for part in parts if (use := getattr(part, side))]
        without = [replace(use, trials=0) if part == GROUPS else use for part, use in uses]
        sums.append(sum(without, Use()) if without else None)
    return Part(name, None, label, None, basis, *sums)


def _row(part: Part, devices: int | None, cost: Cost | None, *, once: bool) -> dict[str, object]:
    """Return the row of a part. ``once``: whether the run took one invocation.

    ``error``: the relative error of an estimate, of a part whose planned trials were all started. Of several
    invocations what is outside of trials was more than estimated.
    """
    expected, actual = part.estimated, part.actual
    can_be_graded = part.basis == "earlier run" and (once or part.part in (CELL, TRAINING, *PURPOSES))
    error = None
    if can_be_graded and expected and actual and actual.seconds and expected.trials == actual.trials:
        error = expected.seconds / actual.seconds - 1
    return {
        **{name: getattr(part, name) for name in ("part", "cell_id", "label", "devices", "basis")},
        **_quantities("estimated", expected, devices, cost),
        **_quantities("actual", actual, devices, cost),
        "planned_trials": expected and expected.trials,
        "measured_trials": actual and actual.trials,
        "currency": cost.currency if cost else None,
        "error": error,
    }


def _quantities(side: str, use: Use | None, devices: int | None, cost: Cost | None) -> dict[str, float | None]:
    if use is None:
        return {}
    hours = None if devices is None else use.seconds * devices / HOUR_S
    return {
        f"{side}_s": use.seconds,
        f"{side}_device_hours": hours,
        f"{side}_busy_device_hours": use.device_s / HOUR_S,
        f"{side}_cost": hours * cost.per_device_hour if cost and hours is not None else None,
        f"{side}_energy_kwh": None if use.energy_j is None else use.energy_j / JOULES_PER_KWH,
    }
