"""Trainings epoch by epoch: a table for the report, lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pandas as pd

from harness.plan.trial import Columns
from harness.report.labels import cell_label
from harness.report.row import Row, Scalar, is_missing, number, rows_of
from harness.report.tables.scaling import METRICS, training_setting
from harness.report.tables.text import Column, TextTable, decimal, flush_right, loss_form, make_table, words

MOST_EPOCHS = 20
"""The most epochs of a training that are shown."""
MOST_ROWS = 200
TRIAL = ["trial_id", "attempt"]
LOSSES = {"train_loss": "training loss", "val_loss": "validation loss"}
NO_METRICS = (*LOSSES, "train_s")
rate = decimal("{:.4g}")


def epochs_table(epochs: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """Return the epochs of each training: losses, metrics and learning rate, and the samples of the training set."""
    own = [name for name in trials.columns if name in TRIAL or name not in epochs.columns]
    merged = epochs.merge(trials.loc[trials["kind"] == "convergence", own], on=TRIAL, validate="many_to_one")
    shown = [name for name in _metrics(epochs.columns) if epochs[name].notna().any()]
    columns: tuple[Column, ...] = (
        ("strategy", cell_label, words),
        ("setting", training_setting, words),
        ("seed", "seed", flush_right),
        ("epoch", "epoch", flush_right),
        *((title, name, _loss) for name, title in LOSSES.items()),
        *((_title(name), partial(_shown, name), flush_right) for name in shown),
        ("learning rate", "learning_rate", rate),
        ("training samples", "training_samples", decimal("{:,.0f}")),
    )
    rows = [row for _, group in merged.groupby(TRIAL, sort=False) for row in _some(rows_of(group.sort_values("epoch")))]
    rest = f"and {len(rows) - MOST_ROWS} more, in epochs.parquet" if len(rows) > MOST_ROWS else ""
    return make_table(columns, rows[:MOST_ROWS], rest=rest)


def epoch_lines(epochs: Columns) -> list[str]:
    """Return a line an epoch of one training, as its result has them: 'epoch 3: training loss 0.0634, ...'."""
    names = list(epochs)
    rows: list[Row] = [dict(zip(names, values, strict=True)) for values in zip(*epochs.values(), strict=True)]
    return [_epoch_line(row) for row in _some(rows)]


def _epoch_line(row: Row) -> str:
    known = [name for name in _metrics(row) if not is_missing(row[name])]
    values = (
        *(f"{title} {_loss(row[name])}" for name, title in LOSSES.items() if row.get(name) is not None),
        *(f"{_title(name)} {_shown(name, row)}" for name in known),
        f"learning rate {rate(row['learning_rate'])}",
    )
    return f"epoch {number(row['epoch']):.0f}: {', '.join(values)}"


def _loss(value: Scalar) -> str:
    """Return a loss, '-' if it is missing, and 'nan' if the training diverged."""
    return "-" if value is None else loss_form(number(value)).format(number(value))


def _some(rows: Sequence[Row]) -> list[Row]:
    """Return at most MOST_EPOCHS rows, evenly spaced, and of these always the last."""
    every = -(-len(rows) // MOST_EPOCHS)
    return [row for place, row in enumerate(rows, start=1) if (len(rows) - place) % every == 0]


def _metrics(names: Iterable[object]) -> list[str]:
    """Return the metrics among the columns of epochs: of the training set, then of the validation set."""
    found = [str(name) for name in names if str(name) not in NO_METRICS]
    return [name for start in ("train_", "val_") for name in found if name.startswith(start)]


def _title(name: str) -> str:
    """Return the heading of a metric: 'training accuracy', 'validation accuracy'."""
    kind = "training" if name.startswith("train_") else "validation"
    return f"{kind} {_format_of(name)[0] or name.partition('_')[2]}"


def _shown(name: str, row: Row) -> str:
    _, factor, form, suffix = _format_of(name)
    return decimal(form + suffix, factor)(row[name])


def _format_of(name: str) -> tuple[str, float, str, str]:
    """Return title, factor, format and unit of a metric, the same on both sets."""
    return METRICS.get(f"val_{name.partition('_')[2]}", ("", 1.0, "{:.4g}", ""))
