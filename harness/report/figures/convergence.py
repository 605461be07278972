"""Learning curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.results import Results
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.axes import linear_values, log_limits, log_values
from harness.report.figures.chart import MOST_MARKS, mark
from harness.report.figures.common import (
    Drawing,
    add_legend,
    draw_lines,
    hatch_point,
    make_grid,
    strategy_legend,
)
from harness.report.row import Row, number, rows_of
from harness.report.tables.text import decimal, plural

CLOCKS = (("samples", "training samples"), ("train_s", "training time (s)"))
TRIAL = ["trial_id", "attempt"]
accuracy = decimal("{:.1f} %", 100)


def learning_curves(results: Results) -> Drawing:
    """Draw training loss, and accuracy or validation loss, against samples and training time, one line a seed."""
    title = "Learning curves, against samples and training time"
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    keys = [*TRIAL, "strategy", "devices", "seed", *TAGS]
    curves = results.epochs.merge(trials[keys], on=TRIAL, validate="many_to_one")
    if curves.empty:
        return Drawing(title, "Left out: no training was recorded (the file has no convergence section).", None)
    has_accuracy = curves["val_accuracy"].notna().any()
    second = ("val_accuracy", "validation accuracy") if has_accuracy else ("val_loss", "validation loss")
    quantities = (("train_loss", "training loss"), second)
    otherwise = results.convergence[results.convergence["excluded"].notna()]
    ends = curves.merge(otherwise[TRIAL], on=TRIAL).sort_values("epoch").drop_duplicates(TRIAL, keep="last")
    figure, grid = make_grid(len(quantities), len(CLOCKS))
    for line, (value, label) in zip(grid, quantities, strict=True):
        for axes, (clock, clock_label) in zip(line, CLOCKS, strict=True):
            _set_values(axes, curves, value)
            linear_values(axes, "x")
            draw_lines(axes, curves.sort_values("epoch"), clock, value, TRIAL)
            for end in rows_of(ends.dropna(subset=[clock, value])):
                hatch_point(axes, number(end[clock]), number(end[value]))
            for row in _marked(curves.dropna(subset=[clock, value])):
                text = f"{row['strategy']} x{row['devices']}, seed {row['seed']}, epoch {row['epoch']}"
                mark(axes, number(row[clock]), number(row[value]), f"{text}: {_shown(row, value)}")
            axes.set_xlabel(clock_label if value == second[0] else "")
            axes.set_ylabel(label if axes is line[0] else "")
    add_legend(figure, strategy_legend(curves))
    return Drawing(title, _caption(trials, otherwise) + captions.unverified(results.convergence), figure)


def _set_values(axes: Axes, curves: pd.DataFrame, value: str) -> None:
    """Set the axis of a quantity, the same against both clocks: a loss logarithmic if it is positive, accuracy in %."""
    known = curves[value].dropna().astype(float)
    finite = known[np.isfinite(known)]
    if value == "val_accuracy" or finite.empty or finite.min() <= 0:
        linear_values(axes, "y", percent=value == "val_accuracy")
    else:
        log_values(axes, "y", log_limits([*finite], []))


def _marked(curves: pd.DataFrame) -> list[Row]:
    """Return the epochs whose values show on hover: all, or the last of each training if there are many."""
    few = len(curves) <= MOST_MARKS // (len(CLOCKS) * 2)
    return rows_of(curves if few else curves.sort_values("epoch").drop_duplicates(TRIAL, keep="last"))


def _shown(row: Row, value: str) -> str:
    return accuracy(row[value]) if value == "val_accuracy" else f"{number(row[value]):.4g}"


def _caption(trials: pd.DataFrame, otherwise: pd.DataFrame) -> str:
    """Return the caption. ``otherwise``: the trainings of cells that are not equivalent to one device."""
    differ = f" Not equivalent to one device, and hatched: {_which(otherwise)}." if len(otherwise) else ""
    seeds = plural(trials["seed"].nunique(), "seed")
    return (
        f"One line a training: {_which(trials)}; {seeds} each, {captions.global_batches(trials)}. "
        "Training time excludes evaluation; the first epoch includes the warm-up of its first steps."
        f"{differ}{captions.set_apart(trials)}"
    )


def _which(trials: pd.DataFrame) -> str:
    pairs = sorted({(str(row["strategy"]), number(row["devices"])) for row in rows_of(trials)})
    return ", ".join(f"{strategy} on {devices:.0f}" for strategy, devices in pairs)
