"""How trainings learn."""

from __future__ import annotations

from harness.plots import captions
from harness.plots.common import (
    COLOURS,
    MARKERS,
    Drawing,
    Tables,
    add_legend,
    is_apart,
    make_grid,
    strategy_legend,
)
from harness.schema import EPOCHS


def learning_curves(tables: Tables) -> Drawing:
    """Loss and accuracy against samples and against training time, one line a seed."""
    name, title = "convergence", "Loss and accuracy against samples and training time"
    trials = tables.trials[(tables.trials["kind"] == "convergence") & tables.trials["outcome"].isin(["ok", "diverged"])]
    keys = ["trial_id", "attempt", "strategy", "devices", "seed", "emulated", "oversubscribed"]
    curves = tables.epochs.merge(trials[keys], on=["trial_id", "attempt"], validate="many_to_one")
    if curves.empty:
        return Drawing(name, title, "Left out: no training was recorded (the file has no convergence section).", None)
    quantities = [("train_loss", "training loss"), ("val_loss", "validation loss")]
    if curves["val_accuracy"].notna().any():
        quantities[1] = ("val_accuracy", "validation accuracy")
    figure, grid = make_grid(len(quantities), 2)
    for row, (value, label) in enumerate(quantities):
        for column, (clock, clock_label) in enumerate(
            [("samples", EPOCHS.column("samples").label), ("train_s", "training time (s)")]
        ):
            axes = grid[row][column]
            for _, curve in curves.groupby(["trial_id", "attempt"]):
                curve = curve.sort_values("epoch")
                first = curve.iloc[0]
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
            if value.endswith("loss"):
                axes.set_yscale("log")
            axes.set_xlabel(clock_label)
            axes.set_ylabel(label)
    add_legend(figure, strategy_legend(curves))
    counts = ", ".join(
        f"{strategy} on {devices}"
        for strategy, devices in sorted({(r.strategy, r.devices) for r in trials.itertuples()})
    )
    seeds = curves["seed"].nunique()
    caption = (
        f"One line a training: {counts}; {seeds} seed{'s' * (seeds > 1)} each, {captions.global_batches(trials)}. "
        f"Training time excludes evaluation.{captions.set_apart(curves)}"
    )
    return Drawing(name, title, caption, figure)
