"""What was measured, as rows and columns of plain values; steps, of which there are many, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.measure.stepper import Stretch

StepColumns = dict[str, npt.NDArray[Any]]
WINDOW_KEYS = ("rank", "window", "window_kind")
"""What names a window; the rest of its row are amounts."""
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


def step_columns(rank: int, stretches: Sequence[Stretch]) -> StepColumns:
    """One row a step of one rank, in columns; ``loss`` is the mean over the rank's own batch."""
    return joined(
        [_of_window(rank, index, stretch) for index, stretch in enumerate(stretches) if stretch.kind in STEPPED]
    )


def _of_window(rank: int, index: int, stretch: Stretch) -> StepColumns:
    window = stretch.window
    losses = np.array([float(loss) for loss in window.losses])
    weights = np.array([float(weight) for weight in window.weights])
    return {
        "rank": np.full(window.steps, rank),
        "window": np.full(window.steps, index),
        "step": np.arange(window.steps),
        "warmup": np.full(window.steps, stretch.kind == "warmup"),
        "step_s": np.array(window.step_s, dtype=float),
        "wait_s": np.array(window.wait_s, dtype=float),
        "loss": losses / np.maximum(weights, 1.0),
    }


def joined(parts: Sequence[StepColumns]) -> StepColumns:
    """The rows of every part under each other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns; None where a row lacks a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
