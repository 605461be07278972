"""Learning curves, epoch by epoch and step by step."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import order
from harness.analysis.results import Results
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.drawing import (
    MOST_FACETS,
    MOST_MARKS,
    PANEL,
    WIDTH,
    Drawing,
    add_legend,
    add_title,
    draw_lines,
    hatch_point,
    make_grid,
    mark,
    strategy_legend,
)
from harness.report.figures.scales import linear_values, log_limits, log_values
from harness.report.row import plural, rows_of, settings
from harness.report.tables.text import decimal

TRIAL, PLACE = ["trial_id", "attempt"], ["strategy", "devices"]
MOST_POINTS = 500
"""The most steps of a training that are drawn: about as many as a panel has pixels."""
QUANTITIES = {"loss": "training loss", "learning_rate": "learning rate"}
CLOCKS = {"samples": "training samples", "train_s": "training time (s)"}
MARGIN = 0.05
"""Beyond the lowest and the highest value of a linear axis, as a share of what is between them."""
accuracy = decimal("{:.1f} %", 100)


def _trainings(results: Results, values: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the trainings, and their rows of ``values`` with strategy, devices, seed, tags and ``setting``."""
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    named = trials[[*TRIAL, "strategy", "devices", "seed", *TAGS]].assign(setting=settings(trials))
    return trials, values.merge(named, on=TRIAL, validate="many_to_one")


def _settings_in_order(trials: pd.DataFrame, drawn: pd.DataFrame) -> list[str]:
    """Return the settings that have drawn rows, in the order of tables."""
    pairs = sorted(zip(rows_of(trials), settings(trials), strict=True), key=lambda pair: order(pair[0]))
    known = {*drawn["setting"]}
    return [name for name in dict.fromkeys(name for _, name in pairs) if name in known][:MOST_FACETS]


def losses_by_step(results: Results) -> Drawing:
    """Draw the loss and the learning rate of the steps of each training, one line a seed, one row a setting."""
    title = "Training loss and learning rate, step by step"
    trials, merged = _trainings(results, results.training_steps)
    steps = merged.sort_values([*TRIAL, "step"], kind="stable")
    by_training = steps.groupby(TRIAL)["step"]
    place, total = by_training.cumcount(), by_training.transform("size")
    drawn = steps[(place % np.ceil(total / MOST_POINTS) == 0) | (place == total - 1)]  # evenly spaced, and the last
    if drawn.empty:
        return Drawing(title, "Left out: no step of a training was recorded.", None)
    names = _settings_in_order(trials, drawn)
    figure, grid = make_grid(len(names), len(QUANTITIES))
    for line, setting in zip(grid, names, strict=True):
        for axes, (name, label) in zip(line, QUANTITIES.items(), strict=True):
            _set_values(axes, drawn[name])  # the same in every row
            linear_values(axes, "x")
            shown = drawn[(drawn["setting"] == setting) & np.isfinite(drawn[name].astype(float))]
            draw_lines(axes, shown, "step", name, TRIAL, marked=False)
            axes.set_xlabel("step" if line is grid[-1] else "")
            axes.set_ylabel(label)
            add_title(axes, setting if len(names) > 1 else "")
    add_legend(figure, strategy_legend(drawn))
    some = len(drawn) < len(steps)
    spaced = f" At most {MOST_POINTS} evenly spaced steps of each training are drawn." if some else ""
    finite = np.isfinite(drawn["loss"].astype(float)).all()
    caption = (
        "One line a training. Loss: mean over the global batch, before the step's update. Learning rate: with warm-up "
        f"and schedule. All recorded steps: training_steps.parquet.{spaced}"
        f"{'' if finite else ' A line ends where the loss is not finite.'}{captions.set_apart(trials)}"
        f"{captions.cut(names)}"
    )
    return Drawing(title, caption, figure)


def _set_values(axes: Axes, values: pd.Series[float], *, percent: bool = False, in_all: bool = False) -> None:
    """Set a logarithmic axis if every finite value is positive and they differ; values not finite are gaps.

    ``in_all``: the same limits in all panels of a quantity, also if its values do not differ.
    """
    known = values.dropna().astype(float)
    finite = known[np.isfinite(known)]
    low, high = finite.min(), finite.max()
    if not percent and low > 0 and (in_all or low < high):
        log_values(axes, "y", log_limits([low, high], []))
        return
    linear_values(axes, "y", percent=percent)
    if in_all and len(finite):
        margin = MARGIN * (high - low) or MARGIN
        axes.set_ylim(low - margin, high + margin)


def learning_curves(results: Results) -> Drawing:
    """Draw training loss, and accuracy or validation loss, against samples and training time, one line a seed.

    One setting has a row of panels for each quantity; of several each has one row with all of its panels.
    """
    title = "Learning curves, against samples and training time"
    trials, curves = _trainings(results, results.epochs)
    if curves.empty:
        return Drawing(title, "Left out: no training was recorded (the file has no convergence section).", None)
    has_accuracy = curves["val_accuracy"].notna().any()
    second = ("val_accuracy", "validation accuracy") if has_accuracy else ("val_loss", "validation loss")
    differing = results.convergence[results.convergence["excluded"].notna()]
    ends = curves.merge(differing[TRIAL], on=TRIAL).sort_values("epoch").drop_duplicates(TRIAL, keep="last")
    names = _settings_in_order(trials, curves)
    places = list(product((("train_loss", "training loss"), second), CLOCKS))
    columns = len(CLOCKS) if len(names) == 1 else len(places)
    figure, grid = make_grid(len(places) * len(names) // columns, columns, (WIDTH / max(columns, 3), PANEL[1]))
    flat = [axes for line in grid for axes in line]
    for at, name in enumerate(names):
        part, last = (rows[rows["setting"] == name] for rows in (curves, ends))
        for place, ((value, label), clock) in enumerate(places):
            axes = flat[at * len(places) + place]
            _set_values(axes, curves[value], percent=value == "val_accuracy", in_all=True)
            _draw(axes, part, last, clock, value, few=len(curves) <= MOST_MARKS // len(places))
            is_last = at == len(names) - 1 and (columns > len(CLOCKS) or value == second[0])
            axes.set_xlabel(CLOCKS[clock] if is_last else "")
            axes.set_ylabel(label if clock == "samples" else "")
        if len(names) > 1:
            add_title(flat[at * len(places)], name, "left")
    add_legend(figure, strategy_legend(curves))
    trained, others = (captions.cells(rows.sort_values(PLACE)) for rows in (trials, differing))
    seeds = plural(trials["seed"].nunique(), "seed")
    batches = ", ".join(map(str, sorted(trials["global_batch_size"].dropna().astype(int).unique())))
    caption = (
        f"One line a training: {trained}; {seeds} each, global batch {batches}. "
        "Training time excludes evaluation; the first epoch includes the warm-up of its first steps."
        f"{f' Not equivalent to one device, and hatched: {others}.' if others else ''}"
        f"{captions.set_apart(trials)}{captions.unverified(results.convergence)}"
        f"{captions.cut(names)}"
    )
    return Drawing(title, caption, figure)


def _draw(axes: Axes, part: pd.DataFrame, last: pd.DataFrame, clock: str, value: str, *, few: bool) -> None:
    """Draw a quantity of one setting against a clock.

    ``last``: the ends of trainings that are hatched. ``few``: whether every epoch shows its value on hover, or the last
    one of each training.
    """
    linear_values(axes, "x")
    draw_lines(axes, part.sort_values("epoch"), clock, value, TRIAL)
    for end in rows_of(last.dropna(subset=[clock, value])):
        hatch_point(axes, end[clock], end[value])
    known = part.dropna(subset=[clock, value])
    for row in rows_of(known if few else known.sort_values("epoch").drop_duplicates(TRIAL, keep="last")):
        text = f"{row.strategy} x{row.devices}, seed {row.seed}, epoch {row.epoch}"
        shown = accuracy(row[value]) if value == "val_accuracy" else f"{row[value]:.4g}"
        mark(axes, row[clock], row[value], f"{text}: {shown}")
