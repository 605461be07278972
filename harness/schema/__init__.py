"""Every table's columns, once: name, type, unit, meaning. Frames, axis labels and results/README.md follow it."""

from __future__ import annotations

from harness.schema.derived import CELLS, CONVERGENCE, NOISE, OUTCOMES, SCALING
from harness.schema.recorded import AXIS_COLUMNS, CHECKS, EPOCHS, RANKS, STEPS, TRIALS, WINDOWS
from harness.schema.table import Column, Table

__all__ = [
    "AXES",
    "CELLS",
    "CHECKS",
    "CONVERGENCE",
    "DERIVED",
    "EPOCHS",
    "NOISE",
    "OUTCOMES",
    "RANKS",
    "RECORDED",
    "SCALING",
    "STEPS",
    "TRIALS",
    "WINDOWS",
    "Column",
    "Table",
]

RECORDED = (TRIALS, WINDOWS, RANKS, STEPS, EPOCHS, CHECKS)
DERIVED = (CELLS, SCALING, NOISE, CONVERGENCE, OUTCOMES)
AXES = tuple(column.name for column in AXIS_COLUMNS)
