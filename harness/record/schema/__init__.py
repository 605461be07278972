"""The schema of every table: name, type, unit and meaning of each column; frames and results/README.md follow it."""

# ruff: noqa: F403, F405  # this package is the one place from which its modules' tables are imported

from __future__ import annotations

import pandas as pd

from harness.record.schema.compared import *
from harness.record.schema.conclusions import *
from harness.record.schema.derived import *
from harness.record.schema.recorded import *
from harness.record.schema.table import *

RAW = (STEPS, EPOCHS, CHECKS, TRAINING_STEPS)
"""The tables whose rows each trial has in files of its own, below raw/."""
RECORDED = (TRIALS, WINDOWS, RANKS, STEPS, EPOCHS, TRAINING_STEPS, CHECKS)
_CONCLUSIONS = (VERDICT, LEADERS, CELLS, SCALING, NOISE, PARITY, VERSUS, IMPROVEMENTS, EQUIVALENCE, WATERFALL)
_TIMES = (PREDICTION, PHASES, HOST_PHASES, STALLS, CONVERGENCE, PUBLISHED, OUTCOMES, MISSING, PREVIEW, LEDGER)
DERIVED = (*_CONCLUSIONS, *_TIMES, GPUS, DEVICE_MEMORY, LINKS, COLLECTIVES, EXCHANGES, FINDINGS)
"""The tables that are computed, in the order of the report."""
COMPARED = (RUNS, COMPARISON, GATE, HISTORY)
DESCRIPTION = tuple(column.name for column in CELL_COLUMNS)
"""The names of the columns that describe a cell: its labels and axes."""


def table_of(name: str) -> Table:
    """Return the table of a name; raises KeyError."""
    return {table.name: table for table in (*RECORDED, *DERIVED)}[name]


def empty_table(name: str) -> pd.DataFrame:
    """Return the table of a name without rows, with its columns and types."""
    return table_of(name).frame([])
