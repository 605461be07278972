"""The schema of every table: name, type, unit and meaning of each column; frames and results/README.md follow it."""

from __future__ import annotations

import pandas as pd

from harness.record.schema.compared import COMPARISON, DECISION, GATE, HISTORY, RUNS
from harness.record.schema.conclusions import IMPROVEMENTS, LEADERS, PUBLISHED, VERDICT
from harness.record.schema.derived import (
    CELLS,
    COLLECTIVES,
    CONVERGENCE,
    DEVICE_MEMORY,
    EQUIVALENCE,
    EXCHANGES,
    FINDINGS,
    GPUS,
    HOST_PHASES,
    LEDGER,
    LINKS,
    MISSING,
    NOISE,
    OUTCOMES,
    PARITY,
    PHASES,
    PREDICTION,
    PREVIEW,
    SCALING,
    STALLS,
    VERSUS,
    WATERFALL,
)
from harness.record.schema.recorded import (
    CHECKS,
    EPOCHS,
    RANKS,
    STEPS,
    TRAINING_STEPS,
    TRIAL_COLUMNS,
    TRIALS,
    WINDOWS,
)
from harness.record.schema.table import CELL_COLUMNS, Column, Table

__all__ = [
    "CELLS",
    "CHECKS",
    "COLLECTIVES",
    "COMPARED",
    "COMPARISON",
    "CONVERGENCE",
    "DECISION",
    "DERIVED",
    "DESCRIPTION",
    "DEVICE_MEMORY",
    "EPOCHS",
    "EQUIVALENCE",
    "EXCHANGES",
    "FINDINGS",
    "GATE",
    "GPUS",
    "HISTORY",
    "HOST_PHASES",
    "IMPROVEMENTS",
    "LEADERS",
    "LEDGER",
    "LINKS",
    "MISSING",
    "NOISE",
    "OUTCOMES",
    "PARITY",
    "PHASES",
    "PREDICTION",
    "PREVIEW",
    "PUBLISHED",
    "RANKS",
    "RAW",
    "RECORDED",
    "RUNS",
    "SCALING",
    "STALLS",
    "STEPS",
    "TRAINING_STEPS",
    "TRIALS",
    "TRIAL_COLUMNS",
    "VERDICT",
    "VERSUS",
    "WATERFALL",
    "WINDOWS",
    "Column",
    "Table",
    "empty_table",
    "table_of",
]

RAW = (STEPS, EPOCHS, CHECKS, TRAINING_STEPS)
"""The tables whose rows each trial has in files of its own, below raw/."""
RECORDED = (TRIALS, WINDOWS, RANKS, STEPS, EPOCHS, TRAINING_STEPS, CHECKS)
DERIVED = (
    VERDICT,
    LEADERS,
    CELLS,
    SCALING,
    NOISE,
    PARITY,
    VERSUS,
    IMPROVEMENTS,
    EQUIVALENCE,
    WATERFALL,
    PREDICTION,
    PHASES,
    HOST_PHASES,
    STALLS,
    CONVERGENCE,
    PUBLISHED,
    OUTCOMES,
    MISSING,
    PREVIEW,
    LEDGER,
    GPUS,
    DEVICE_MEMORY,
    LINKS,
    COLLECTIVES,
    EXCHANGES,
    FINDINGS,
)
COMPARED = (RUNS, COMPARISON, GATE, HISTORY)
DESCRIPTION = tuple(column.name for column in CELL_COLUMNS)
"""The names of the columns that describe a cell: its labels and axes."""


def table_of(name: str) -> Table:
    """Return the table of a name; raises KeyError."""
    return {table.name: table for table in (*RECORDED, *DERIVED)}[name]


def empty_table(name: str) -> pd.DataFrame:
    """Return the table of a name without rows, with its columns and types."""
    return table_of(name).frame([])
