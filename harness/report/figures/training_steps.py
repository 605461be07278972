"""The loss and the learning rate of every training, step by step."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import order
from harness.analysis.results import Results
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.axes import linear_values, log_limits, log_values
from harness.report.figures.common import (
    MOST_FACETS,
    Drawing,
    add_legend,
    add_title,
    draw_lines,
    make_grid,
    strategy_legend,
)
from harness.report.labels import settings
from harness.report.row import rows_of

TRIAL = ["trial_id", "attempt"]
MOST_POINTS = 500
"""The most steps of a training that are drawn: about as many as a panel has pixels."""
QUANTITIES = {"loss": "training loss", "learning_rate": "learning rate"}


def losses_by_step(results: Results) -> Drawing:
    """Draw the loss and the learning rate of the steps of each training, one line a seed, one row a setting."""
    title = "Training loss and learning rate, step by step"
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    keys = [*TRIAL, "strategy", "devices", "seed", *TAGS]
    named = trials[keys].assign(panel=settings(trials))
    merged = results.training_steps.merge(named, on=TRIAL, validate="many_to_one")
    steps = merged.sort_values([*TRIAL, "step"], kind="stable")
    drawn = steps[_is_drawn(steps)]
    if drawn.empty:
        return Drawing(title, "Left out: no step of a training was recorded.", None)
    names = [panel for panel in in_order(trials) if (drawn["panel"] == panel).any()][:MOST_FACETS]
    figure, grid = make_grid(len(names), len(QUANTITIES))
    for line, panel in zip(grid, names, strict=True):
        for axes, (name, label) in zip(line, QUANTITIES.items(), strict=True):
            _set_values(axes, drawn[name])  # the same in every row
            linear_values(axes, "x")
            shown = drawn[(drawn["panel"] == panel) & np.isfinite(drawn[name].astype(float))]
            draw_lines(axes, shown, "step", name, TRIAL, marked=False)
            axes.set_xlabel("step" if line is grid[-1] else "")
            axes.set_ylabel(label)
            add_title(axes, panel if len(names) > 1 else "")
    add_legend(figure, strategy_legend(drawn))
    caption = _caption(trials, drawn, all_steps=len(drawn) == len(steps))
    return Drawing(title, caption + captions.cut([(name, drawn) for name in names]), figure)


def in_order(trials: pd.DataFrame) -> list[str]:
    """Return the settings of trainings in the order of tables."""
    pairs = zip(rows_of(trials), settings(trials), strict=True)
    return list(dict.fromkeys(panel for _, panel in sorted(pairs, key=lambda pair: order(pair[0]))))


def _is_drawn(steps: pd.DataFrame) -> pd.Series[bool]:
    """Return which steps are drawn: at most MOST_POINTS evenly spaced ones of each training, and its last."""
    by_training = steps.groupby(TRIAL)["step"]
    number, total = by_training.cumcount(), by_training.transform("size")
    drawn: pd.Series[bool] = (number % np.ceil(total / MOST_POINTS) == 0) | (number == total - 1)
    return drawn


def _set_values(axes: Axes, values: pd.Series[float]) -> None:
    """Set a logarithmic axis if every finite value is positive and their ratio is large; values not finite are gaps."""
    known = values.dropna().astype(float)
    finite = known[np.isfinite(known)]
    if finite.empty or finite.min() <= 0 or finite.max() == finite.min():
        linear_values(axes, "y")
    else:
        log_values(axes, "y", log_limits([*finite], []))


def _caption(trials: pd.DataFrame, drawn: pd.DataFrame, *, all_steps: bool) -> str:
    some = "" if all_steps else f" At most {MOST_POINTS} evenly spaced steps of each training are drawn."
    finite = np.isfinite(drawn["loss"].astype(float)).all()
    diverged = "" if finite else " A line ends where the loss is not finite."
    return (
        "One line a training. Loss: mean over the global batch, before the step's update. Learning rate: with warm-up "
        f"and schedule. All recorded steps: training_steps.parquet.{some}{diverged}{captions.set_apart(trials)}"
    )
