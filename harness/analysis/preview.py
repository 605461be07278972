"""The estimate of a plan's time by part, and the run that followed: time, device-hours, energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from harness.analysis.common import Lines, grouped, order
from harness.analysis.durations import Durations, TimedRun, power_of
from harness.analysis.trials import labels_of
from harness.plan.comparison import axes_of
from harness.plan.feasibility import HOUR_S
from harness.plan.labels import SEPARATOR
from harness.plan.planner import Plan
from harness.plan.run_environment import RunEnvironment, wall_seconds
from harness.plan.trial import PURPOSES, Trial
from harness.record.estimate import Basis, Bound, Estimate, PartTime
from harness.record.schema import PREVIEW

CELL, TRAINING = "cell", "convergence"
GROUPS, COMMAND, REPORT = "worker groups", "command", "report"
MEASUREMENT, TOTAL = "measurement", "total"
PART_LABELS: Mapping[str, str] = {
    **{name: traits.label for name, traits in PURPOSES.items()},
    GROUPS: "start and end of worker groups",
    COMMAND: "plan, Ray, records",
    REPORT: "report",
}
"""The parts beside cells and trainings, in the order of the table."""
PLACES = (CELL, TRAINING, *PART_LABELS)
FEW_BLOCKS = 3
"""The fewest blocks that give an interval."""
JOULES_PER_KWH = 3.6e6


def estimate_of(plan: Plan, earlier: TimedRun | None) -> Estimate:
    """Return the time of each part of a plan, from an earlier run; without one, or for cells that it lacks, the least.

    The time of trainings without an earlier run is unknown: the number of their steps is known on the ranks alone.
    """
    durations = earlier.durations if earlier else Durations()
    trials = grouped(plan.trials, lambda trial: _key(trial.kind, trial.purpose, trial.cell.id))
    cells = {key: order(axes_of(of_part[0].cell)) for key, of_part in trials.items() if key[1]}
    keys = sorted(trials, key=lambda key: (PLACES.index(key[0]), cells.get(key, ())))  # as in tables, then by purpose
    parts = [_of_trials(plan, trials[key], durations) for key in keys]
    if plan.groups:
        starts = [durations.start(group) for group in plan.groups]
        basis: Basis = "earlier run" if all(start.is_known for start in starts) else "lower bound"
        parts.append(_outside(GROUPS, sum(start.seconds for start in starts), len(starts), basis))
        command_s, report_s = (earlier.command_s, earlier.report_s) if earlier else (None, None)
        for part, seconds in ((COMMAND, command_s), (REPORT, report_s)):
            parts.append(_outside(part, seconds, 0, "unknown" if seconds is None else "earlier run"))
    timed = plan.experiment.throughput
    bound: Bound = "at most" if timed and timed.rule else "about"
    if any(part.basis == "lower bound" for part in parts):  # unknown parts are in no sum
        bound = "about" if bound == "at most" else "at least"
    most = max((group.placement.devices for group in plan.groups), default=0)  # groups run one after the other
    devices = plan.machine.devices
    return Estimate(str(earlier.path) if earlier else None, devices, min(most, devices), bound, parts)


def _key(kind: str, purpose: str, cell_id: str) -> tuple[str, str | None]:
    """Return the part of a trial, and its cell; of a diagnostic trial its purpose alone."""
    return (purpose, None) if purpose else (TRAINING if kind == "convergence" else CELL, cell_id)


def _label(part: str, cell: str) -> str:
    """Return the label of a part; ``cell``: the label of its cell, if it has one."""
    return PART_LABELS.get(part) or (f"{cell}{SEPARATOR}convergence" if part == TRAINING else cell)


def _of_trials(plan: Plan, trials: Sequence[Trial], durations: Durations) -> PartTime:
    part, cell_id = _key(trials[0].kind, trials[0].purpose, trials[0].cell.id)
    seconds = device_s = energy_j = 0.0
    known = powered = 0
    for trial in trials:
        expected = durations.trial(trial, plan, by_kind=bool(trial.purpose) and not trial.timed)
        occupied_s = min(trial.cell.devices, plan.machine.devices) * expected.seconds
        seconds, device_s = seconds + expected.seconds, device_s + occupied_s
        energy_j += (expected.power_w or 0.0) * occupied_s
        known, powered = known + expected.is_known, powered + (expected.power_w is not None)
    label = _label(part, plan.labels.of_cell(trials[0].cell))
    if not known and part == TRAINING:
        return PartTime(part, cell_id, label, len(trials), basis="unknown")
    then = durations.experiment
    explains_more = plan.experiment.explains and then is not None and not then.explains
    basis: Basis = "earlier run" if known == len(trials) and not explains_more else "lower bound"
    energy = energy_j if powered == len(trials) else None
    return PartTime(part, cell_id, label, len(trials), seconds, device_s, energy, basis)


def _outside(part: str, seconds: float | None, trials: int = 0, basis: Basis | None = None) -> PartTime:
    return PartTime(part, None, PART_LABELS[part], trials, seconds, None if seconds is None else 0.0, None, basis)


def savings(plan: Plan, earlier: TimedRun | None) -> dict[str, float]:
    """Return the seconds that smaller studies save, estimated as the whole is, by what each leaves out.

    Fewer blocks, no largest size, one seed.
    """
    smaller: dict[str, Callable[[Trial], bool]] = {}
    timed = [trial for trial in plan.trials if trial.kind == "throughput"]
    blocks = 1 + max((trial.block for trial in timed), default=0)  # of a resumed run with those that it has
    fewer = FEW_BLOCKS if blocks > FEW_BLOCKS else 1
    if blocks > fewer:
        what = f"{fewer} instead of {blocks} blocks{'' if fewer >= FEW_BLOCKS else ', without intervals'}"
        smaller[what] = lambda trial: trial.kind == "convergence" or trial.block < fewer
    sizes = sorted({trial.cell.devices for trial in plan.trials if not trial.added})  # without bases that it adds
    if len(sizes) > 1:
        smaller[f"no cells on {sizes[-1]} devices"] = lambda trial: trial.cell.devices < sizes[-1]
    settings = plan.experiment.convergence
    if settings and len(settings.seeds) > 1 and any(trial.kind == "convergence" for trial in plan.trials):
        what = f"1 instead of {len(settings.seeds)} seeds"
        smaller[what] = lambda trial: trial.kind != "convergence" or trial.seed == settings.seeds[0]
    whole = estimate_of(plan, earlier).seconds
    saved = {what: whole - estimate_of(plan.keeping(wanted), earlier).seconds for what, wanted in smaller.items()}
    return {what: seconds for what, seconds in saved.items() if seconds > 0}


def recorded_parts(lines: Lines, environment: RunEnvironment, devices: int) -> list[PartTime]:
    """Return the time of each part of a run: trials, what is outside of trials, of worker groups, recorded reports.

    A trial occupies at most ``devices``, those of the machine.
    """
    timed = (line for line in lines if line["trial_s"] is not None)
    tried = grouped(timed, lambda line: _key(line["kind"], line["purpose"], line["cell_id"]))
    labels, parts, in_trials = labels_of(lines), [], 0.0
    for (part, cell_id), rows in sorted(tried.items(), key=lambda each: order(each[1][0]) if each[0][1] else ()):
        occupied = [min(int(row["devices"]), devices) * (row["trial_s"] or 0.0) for row in rows]  # device-seconds
        powers = zip(map(power_of, rows), occupied, strict=True)
        energies = [power_w * device_s for power_w, device_s in powers if power_w is not None]
        seconds = sum((row["trial_s"] or 0.0) for row in rows)
        in_trials += seconds
        trials, label = len({row["trial_id"] for row in rows}), _label(part, labels.of(rows[0]))
        energy_j = sum(energies) if energies else None
        parts.append(PartTime(part, cell_id, label, trials, seconds, sum(occupied), energy_j))
    groups = [group["whole_s"] for group in environment.get("groups", [])]
    parts.append(_outside(GROUPS, max(0.0, sum(groups) - in_trials), len(groups)))
    parts.append(_outside(COMMAND, max(0.0, sum(wall_seconds(environment, lines)) - sum(groups))))
    reports = [each["report_s"] for each in environment.get("invocations", []) if "report_s" in each]
    return [*parts, _outside(REPORT, sum(reports))] if reports else parts


def preview(
    estimate: Estimate | None, devices: int, lines: Lines = (), environment: RunEnvironment | None = None
) -> pd.DataFrame:
    """Return the estimate of a run beside what was recorded of it; of a run without an estimate the latter alone.

    ``devices``: of the machine. Without an environment there was no run.
    """
    expected = {(part.part, part.cell_id): part for part in (estimate.parts if estimate else [])}
    recorded = [] if environment is None else recorded_parts(lines, environment, devices)
    actual = {(part.part, part.cell_id): part for part in recorded}
    keys = sorted({**expected, **actual}, key=lambda key: PLACES.index(key[0]))  # stable: cells stay in their order
    if not keys:
        return PREVIEW.frame([])
    pairs = [(expected.get(key), actual.get(key)) for key in keys]
    measured = [pair for key, pair in zip(keys, pairs, strict=True) if key[0] != REPORT]
    until = _sums(MEASUREMENT, "until the report", measured)
    total = _sums(TOTAL, "total", pairs)
    if recorded and (REPORT, None) not in actual:  # a report does not know its own time
        total = total[0], None
    once = environment is not None and len(environment.get("invocations", [])) == 1
    every = [*measured, until, *pairs[len(measured) :], total]
    return PREVIEW.frame(_row(pair, devices, ran=environment is not None, once=once) for pair in every)


Pair = tuple[PartTime | None, PartTime | None]
"""A part as expected and as it was; None: not expected, or not recorded."""


def _sums(part: str, label: str, pairs: Sequence[Pair]) -> Pair:
    """Return the sums of what is known of some parts; the basis is the one of all, a lower bound if they differ."""
    bases = {expected.basis if expected else None for expected, _ in pairs}
    basis: Basis | None = None if bases == {None} else "lower bound"
    if bases <= {"earlier run", "unknown"}:
        basis = "unknown" if "unknown" in bases else "earlier run"
    expected, actual = (_sum(part, label, side, basis) for side in zip(*pairs, strict=True))
    return expected, actual


def _sum(part: str, label: str, parts: Iterable[PartTime | None], basis: Basis | None) -> PartTime:
    """Return the sum of what is known; its trials are of all parts but worker groups."""
    known = [each for each in parts if each and each.seconds is not None]
    if not known:
        return PartTime(part, None, label, basis=basis)
    trials = sum(each.trials for each in known if each.part != GROUPS)
    seconds, device_s = (sum(getattr(each, name) for each in known) for name in ("seconds", "device_s"))
    energies = [each.energy_j for each in known if each.energy_j is not None]
    return PartTime(part, None, label, trials, seconds, device_s, sum(energies) if energies else None, basis)


def _row(pair: Pair, devices: int, *, ran: bool, once: bool) -> dict[str, object]:
    """Return the row of a part. ``ran``: whether there was a run; ``once``: whether it took one invocation.

    ``error``: the relative error of an estimate, of a part whose planned trials were all started. Of several
    invocations what is outside of trials was more than estimated.
    """
    named = next(part for part in pair if part)
    expected, actual = (part if part and part.seconds is not None else None for part in pair)
    used = actual if ran else expected
    is_graded = named.basis == "earlier run" and (once or named.part in (CELL, TRAINING, *PURPOSES))
    error = None
    if is_graded and expected and actual and actual.seconds and expected.trials == actual.trials:
        error = (expected.seconds or 0.0) / actual.seconds - 1
    return {
        **{name: getattr(named, name) for name in ("part", "cell_id", "label", "basis")},
        "planned_trials": expected and expected.trials,
        "measured_trials": actual and actual.trials,
        "estimated_s": expected and expected.seconds,
        "actual_s": actual and actual.seconds,
        "error": error,
        "device_hours": used and (used.seconds or 0.0) * devices / HOUR_S,
        "busy_device_hours": used and (used.device_s or 0.0) / HOUR_S,
        "energy_kwh": None if used is None or used.energy_j is None else used.energy_j / JOULES_PER_KWH,
    }
