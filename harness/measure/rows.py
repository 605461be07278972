"""What was measured, as rows and columns of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.measure.stepper import Stretch

Columns = dict[str, list[Any]]
STEPPED = ("warmup", "timed")
"""The windows whose single steps are recorded."""


def window_rows(rank: int, stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """One row a window of one rank, with the seconds of each phase."""
    return [
        {
            "rank": rank,
            "window": index,
            "window_kind": stretch.kind,
            "duration_s": stretch.window.duration_s,
            "steps": stretch.window.steps,
            "weight": stretch.weight,
            **{f"{phase}_s": seconds for phase, seconds in stretch.window.phases.items()},
            **{f"host_{phase}_s": seconds for phase, seconds in stretch.window.host_phases.items()},
        }
        for index, stretch in enumerate(stretches)
    ]


def step_columns(rank: int, stretches: Sequence[Stretch]) -> Columns:
    """One row a step of one rank, in columns; ``loss`` is the mean over the rank's own batch."""
    columns: Columns = {name: [] for name in ("rank", "window", "step", "warmup", "step_s", "wait_s", "loss")}
    for index, stretch in enumerate(stretches):
        if stretch.kind not in STEPPED:
            continue
        window = stretch.window
        count = window.steps
        columns["rank"] += [rank] * count
        columns["window"] += [index] * count
        columns["step"] += range(count)
        columns["warmup"] += [stretch.kind == "warmup"] * count
        columns["step_s"] += window.step_s
        columns["wait_s"] += window.wait_s
        pairs = zip(window.losses, window.weights, strict=True)
        columns["loss"] += [float(loss) / max(float(weight), 1.0) for loss, weight in pairs]
    return columns


def joined(parts: Sequence[Columns]) -> Columns:
    """The rows of every part under each other."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else {}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns; None where a row lacks a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
