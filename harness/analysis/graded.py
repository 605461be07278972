"""The preview and the run that followed, part by part: estimated and actual time, device-hours, cost and energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from harness.analysis.common import Lines, order
from harness.analysis.preview import PART_LABELS, cell_label
from harness.analysis.time_use import CELL, COMMAND, GROUPS, PURPOSES, REPORT, TRAINING, Key, Use, key_of, time_use
from harness.analysis.trials import labels_of
from harness.config.cost import Cost
from harness.config.values import MAX_DEVICES
from harness.plan.budget import HOUR_S
from harness.plan.environment import RunEnvironment
from harness.record.estimate import Basis, Estimate, EstimatedPart
from harness.record.schema import PREVIEW

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
    parts.sort(key=lambda part: _place(part.part))  # stable: cells stay in their order
    once = environment is not None and len(environment.get("invocations", [])) == 1
    rows = (_row(part, devices, cost, once=once) for part in _with_sums(parts))
    return PREVIEW.frame({**row, "fits": fits.get(str(row["cell_id"]))} for row in rows)


def machine_devices(plan: Mapping[str, Any]) -> int | None:
    """Return the number of devices of the machine of a plan.json; None if it is not recorded."""
    machine = plan.get("machine")
    counts = machine.get("devices_per_node") if isinstance(machine, dict) else None
    known = isinstance(counts, list) and all(isinstance(count, int) and 0 <= count <= MAX_DEVICES for count in counts)
    return sum(counts) if counts and known else None


def _place(part: str) -> int:
    return [CELL, TRAINING, *PURPOSES, GROUPS, COMMAND, REPORT].index(part)


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
    bases = {part.basis for part in parts}
    basis: Basis | None = None if bases == {None} else "lower bound"
    if bases <= {"earlier run", "unknown"}:
        basis = "unknown" if "unknown" in bases else "earlier run"
    sums = [_added(parts, side) for side in ("estimated", "actual")]
    return Part(name, None, label, None, basis, *sums)


def _added(parts: Sequence[Part], side: Literal["estimated", "actual"]) -> Use | None:
    """Return the sum of what is known; its trials are those of all parts but worker groups."""
    known = [(part.part, use) for part in parts if (use := part.estimated if side == "estimated" else part.actual)]
    if not known:
        return None
    return sum((replace(use, trials=0) if part == GROUPS else use for part, use in known), Use())


def _row(part: Part, devices: int | None, cost: Cost | None, *, once: bool) -> dict[str, object]:
    return {
        **{name: getattr(part, name) for name in ("part", "cell_id", "label", "devices", "basis")},
        **_quantities("estimated", part.estimated, devices, cost),
        **_quantities("actual", part.actual, devices, cost),
        "planned_trials": part.estimated and part.estimated.trials,
        "measured_trials": part.actual and part.actual.trials,
        "currency": cost.currency if cost else None,
        "error": _error(part, once=once),
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


def _error(part: Part, *, once: bool) -> float | None:
    """Return the relative error of an estimate, of a part whose planned trials were all started.

    Unless the run took one invocation, ``once``, what is outside of its trials was more than estimated.
    """
    if not once and part.part not in (CELL, TRAINING, *PURPOSES):
        return None
    expected, actual = part.estimated, part.actual
    if part.basis != "earlier run" or expected is None or actual is None or not actual.seconds:
        return None
    return None if expected.trials != actual.trials else expected.seconds / actual.seconds - 1
