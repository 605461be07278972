"""Learning curves."""

from __future__ import annotations

import pandas as pd

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.common import (
    Drawing,
    add_legend,
    draw_lines,
    hatch_point,
    make_grid,
    strategy_legend,
)
from harness.report.row import number, rows_of
from harness.report.tables.text import plural

CLOCKS = (("samples", "training samples"), ("train_s", "training time (s)"))
TRIAL = ["trial_id", "attempt"]


def learning_curves(results: Results) -> Drawing:
    """Draw training loss, and accuracy or validation loss, against samples and training time, one line a seed."""
    title = "Learning curves, against samples and training time"
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    keys = [*TRIAL, "strategy", "devices", "seed", "emulated", "oversubscribed"]
    curves = results.epochs.merge(trials[keys], on=TRIAL, validate="many_to_one")
    if curves.empty:
        return Drawing(title, "Left out: no training was recorded (the file has no convergence section).", None)
    accuracy = curves["val_accuracy"].notna().any()
    second = ("val_accuracy", "validation accuracy") if accuracy else ("val_loss", "validation loss")
    quantities = (("train_loss", "training loss"), second)
    otherwise = results.convergence[results.convergence["excluded"].notna()]
    ends = curves.merge(otherwise[TRIAL], on=TRIAL).sort_values("epoch").drop_duplicates(TRIAL, keep="last")
    figure, grid = make_grid(len(quantities), len(CLOCKS))
    for line, (value, label) in zip(grid, quantities, strict=True):
        for axes, (clock, clock_label) in zip(line, CLOCKS, strict=True):
            draw_lines(axes, curves.sort_values("epoch"), clock, value, TRIAL)
            for end in rows_of(ends.dropna(subset=[clock, value])):
                hatch_point(axes, number(end[clock]), number(end[value]))
            axes.set_yscale("log" if value.endswith("loss") else "linear")
            axes.set_xlabel(clock_label)
            axes.set_ylabel(label)
    add_legend(figure, strategy_legend(curves))
    return Drawing(title, _caption(trials, otherwise) + captions.unverified(results.convergence), figure)


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
