"""Trainings epoch by epoch, as the report and the terminal show them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.report.tables.scaling import MOST_EPOCHS, epoch_lines, epochs_table
from tests.records import epochs_of, line, trials_of


def table_of(epochs: pd.DataFrame) -> list[tuple[str, ...]]:
    lines = [
        line("ddp2", kind="convergence", rates=(1.0, 1.0), seed=seed, block=seed, facts={"training_samples": 1437})
        for seed in (0, 1)
    ]
    table = epochs_table(epochs, trials_of(lines))
    return [tuple(heading.title for heading in table.columns), *(row.cells for row in table.rows)]


def test_the_table_has_losses_metrics_rate_and_samples_of_every_epoch() -> None:
    epochs = epochs_of("ddp2-s1", [0.5, 0.75]).assign(learning_rate=[0.1, 0.01], train_accuracy=[0.6, 0.875])
    titles, first, second = table_of(epochs)
    assert dict(zip(titles, second, strict=True)) == {
        "strategy": "ddp x2",
        "setting": "global batch 20",
        "seed": "1",
        "epoch": "2",
        "training loss": "0.5000",
        "validation loss": "1.0000",
        "training accuracy": "87.5 %",
        "validation accuracy": "75.0 %",
        "learning rate": "0.01",
        "training samples": "1,437",
    }
    assert first[titles.index("epoch")] == "1"


def test_of_a_long_training_some_epochs_are_shown_and_always_the_last() -> None:
    titles, *rows = table_of(epochs_of("ddp2-s0", [0.5] * 45))
    shown = [int(row[titles.index("epoch")]) for row in rows]
    assert shown == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45] and len(shown) <= MOST_EPOCHS
    assert len(table_of(epochs_of("ddp2-s0", [0.5] * 20))) == 1 + 20


def test_lines_for_a_terminal_have_what_was_computed() -> None:
    epochs: dict[str, list[Any]] = {
        "epoch": [1, 2],
        "samples": [1437, 2874],
        "train_s": [1.0, 2.0],
        "train_loss": [1.2, float("nan")],
        "learning_rate": [0.1, 0.01],
        "val_loss": [0.5, None],
        "val_accuracy": [0.966, None],
        "val_iou": [None, None],
        "train_accuracy": [0.99, None],
        "val_error": [0.034, None],
    }
    assert epoch_lines(epochs) == [
        "epoch 1: training loss 1.2000, validation loss 0.5000, training accuracy 99.0 %, validation accuracy 96.6 %, "
        "validation error 0.034, learning rate 0.1",
        "epoch 2: training loss nan, learning rate 0.01",
    ]
    assert epoch_lines({}) == []


def test_a_loss_that_explodes_has_a_short_number() -> None:
    epochs: dict[str, list[Any]] = {"epoch": [1], "train_loss": [99_999.5], "val_loss": [1030116780714.67]}
    (text,) = epoch_lines({**epochs, "learning_rate": [0.1]})
    assert text == "epoch 1: training loss 99999.5000, validation loss 1.03e+12, learning rate 0.1"
