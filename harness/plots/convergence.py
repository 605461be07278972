"""How trainings learn."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from harness.plots import captions
from harness.plots.common import COLOURS, MARKERS, Drawing, Tables, add_legend, is_apart, make_grid, strategy_legend
from harness.present import plural
from harness.schema import EPOCHS

CLOCKS = (("samples", EPOCHS.column("samples").label), ("train_s", "training time (s)"))


def learning_curves(tables: Tables) -> Drawing:
    """Loss and accuracy against samples and against training time, one line a seed."""
    name, title = "convergence", "Loss and accuracy against samples and training time"
    done = tables.trials["outcome"].isin(["ok", "diverged"])
    trials = tables.trials[(tables.trials["kind"] == "convergence") & done]
    keys = ["trial_id", "attempt", "strategy", "devices", "seed", "emulated", "oversubscribed"]
    curves = tables.epochs.merge(trials[keys], on=["trial_id", "attempt"], validate="many_to_one")
    if curves.empty:
        return Drawing(name, title, "Left out: no training was recorded (the file has no convergence section).", None)
    accuracy = curves["val_accuracy"].notna().any()
    second = ("val_accuracy", "validation accuracy") if accuracy else ("val_loss", "validation loss")
    quantities = (("train_loss", "training loss"), second)
    figure, grid = make_grid(len(quantities), len(CLOCKS))
    for line, (value, label) in zip(grid, quantities, strict=True):
        for axes, (clock, clock_label) in zip(line, CLOCKS, strict=True):
            _curves(axes, curves, clock, value)
            axes.set_yscale("log" if value.endswith("loss") else "linear")
            axes.set_xlabel(clock_label)
            axes.set_ylabel(label)
    add_legend(figure, strategy_legend(curves))
    return Drawing(name, title, _caption(trials), figure)


def _curves(axes: Axes, curves: pd.DataFrame, clock: str, value: str) -> None:
    for _, curve in curves.sort_values("epoch").groupby(["trial_id", "attempt"]):
        first: Any = curve.iloc[0]
        axes.plot(
            curve[clock].astype(float),
            curve[value].astype(float),
            color=COLOURS[first["strategy"]],
            marker=MARKERS[first["strategy"]],
            markersize=3,
            linewidth=1,
            alpha=0.75,
            linestyle=":" if is_apart(first) else "-",
        )


def _caption(trials: pd.DataFrame) -> str:
    pairs = sorted({(row["strategy"], row["devices"]) for row in trials.to_dict("records")})
    which = ", ".join(f"{strategy} on {devices}" for strategy, devices in pairs)
    seeds = plural(trials["seed"].nunique(), "seed")
    return (
        f"One line a training: {which}; {seeds} each, {captions.global_batches(trials)}. "
        f"Training time excludes evaluation.{captions.set_apart(trials)}"
    )
