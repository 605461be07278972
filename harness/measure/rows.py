"""What was measured, as rows and columns of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.measure.throughput import Speed

Columns = dict[str, list[Any]]


def window_rows(rank: int, speed: Speed) -> list[dict[str, Any]]:
    """One row a window of one rank; window 0 is the warm-up."""
    return [
        {
            "rank": rank,
            "window": index,
            "warmup": index == 0,
            "duration_s": window.duration_s,
            "steps": window.steps,
            "weight": weight,
        }
        for index, (window, weight) in enumerate(zip(speed.windows, speed.weights, strict=True))
    ]


def step_columns(rank: int, speed: Speed) -> Columns:
    """One row a step of one rank, in columns; ``loss`` is the mean over the rank's own batch."""
    columns: Columns = {name: [] for name in ("rank", "window", "step", "warmup", "step_s", "wait_s", "loss")}
    for index, window in enumerate(speed.windows):
        count = window.steps
        columns["rank"] += [rank] * count
        columns["window"] += [index] * count
        columns["step"] += range(count)
        columns["warmup"] += [index == 0] * count
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
