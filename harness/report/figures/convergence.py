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
from harness.report.figures.axes import linear_values, log_limits, log_values
from harness.report.figures.common import (
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
from harness.report.labels import Row, number, plural, rows_of, settings
from harness.report.tables.text import decimal

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
            _training_steps_set_values(axes, drawn[name])  # the same in every row
            linear_values(axes, "x")
            shown = drawn[(drawn["panel"] == panel) & np.isfinite(drawn[name].astype(float))]
            draw_lines(axes, shown, "step", name, TRIAL, marked=False)
            axes.set_xlabel("step" if line is grid[-1] else "")
            axes.set_ylabel(label)
            add_title(axes, panel if len(names) > 1 else "")
    add_legend(figure, strategy_legend(drawn))
    caption = _training_steps_caption(trials, drawn, all_steps=len(drawn) == len(steps))
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


def _training_steps_set_values(axes: Axes, values: pd.Series[float]) -> None:
    """Set a logarithmic axis if every finite value is positive and their ratio is large; values not finite are gaps."""
    known = values.dropna().astype(float)
    finite = known[np.isfinite(known)]
    if finite.empty or finite.min() <= 0 or finite.max() == finite.min():
        linear_values(axes, "y")
    else:
        log_values(axes, "y", log_limits([*finite], []))


def _training_steps_caption(trials: pd.DataFrame, drawn: pd.DataFrame, *, all_steps: bool) -> str:
    some = "" if all_steps else f" At most {MOST_POINTS} evenly spaced steps of each training are drawn."
    finite = np.isfinite(drawn["loss"].astype(float)).all()
    diverged = "" if finite else " A line ends where the loss is not finite."
    return (
        "One line a training. Loss: mean over the global batch, before the step's update. Learning rate: with warm-up "
        f"and schedule. All recorded steps: training_steps.parquet.{some}{diverged}{captions.set_apart(trials)}"
    )


CLOCKS = (("samples", "training samples"), ("train_s", "training time (s)"))
MARGIN = 0.05
"""Beyond the lowest and the highest value of a linear axis, as a share of what is between them."""
TRIAL = ["trial_id", "attempt"]
accuracy = decimal("{:.1f} %", 100)


def learning_curves(results: Results) -> Drawing:
    """Draw training loss, and accuracy or validation loss, against samples and training time, one line a seed.

    One setting has a row of panels for each quantity; of several each has one row with all of its panels.
    """
    title = "Learning curves, against samples and training time"
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    named = trials[[*TRIAL, "strategy", "devices", "seed", *TAGS]].assign(setting=settings(trials))
    curves = results.epochs.merge(named, on=TRIAL, validate="many_to_one")
    if curves.empty:
        return Drawing(title, "Left out: no training was recorded (the file has no convergence section).", None)
    has_accuracy = curves["val_accuracy"].notna().any()
    second = ("val_accuracy", "validation accuracy") if has_accuracy else ("val_loss", "validation loss")
    quantities = (("train_loss", "training loss"), second)
    otherwise = results.convergence[results.convergence["excluded"].notna()]
    ends = curves.merge(otherwise[TRIAL], on=TRIAL).sort_values("epoch").drop_duplicates(TRIAL, keep="last")
    names = [name for name in in_order(trials) if curves["setting"].eq(name).any()][:MOST_FACETS]
    places = list(product(quantities, CLOCKS))
    columns = len(CLOCKS) if len(names) == 1 else len(places)
    figure, grid = make_grid(len(places) * len(names) // columns, columns, (WIDTH / max(columns, 3), PANEL[1]))
    flat = [axes for line in grid for axes in line]
    for at, name in enumerate(names):
        part, last = (rows[rows["setting"] == name] for rows in (curves, ends))
        for place, ((value, label), clock) in enumerate(places):
            axes = flat[at * len(places) + place]
            _draw(axes, curves, part, last, clock[0], value)
            is_last = at == len(names) - 1 and (columns > len(CLOCKS) or value == second[0])
            axes.set_xlabel(clock[1] if is_last else "")
            axes.set_ylabel(label if clock is CLOCKS[0] else "")
        if len(names) > 1:
            add_title(flat[at * len(places)], name, "left")
    add_legend(figure, strategy_legend(curves))
    cut = captions.cut([(name, curves) for name in names])
    return Drawing(title, _caption(trials, otherwise) + captions.unverified(results.convergence) + cut, figure)


def _draw(axes: Axes, curves: pd.DataFrame, part: pd.DataFrame, last: pd.DataFrame, clock: str, value: str) -> None:
    """Draw a quantity of one setting against a clock; ``last``: the ends of trainings that are hatched."""
    _set_values(axes, curves, value)
    linear_values(axes, "x")
    draw_lines(axes, part.sort_values("epoch"), clock, value, TRIAL)
    for end in rows_of(last.dropna(subset=[clock, value])):
        hatch_point(axes, number(end[clock]), number(end[value]))
    for row in _marked(part.dropna(subset=[clock, value]), few=len(curves) <= MOST_MARKS // (len(CLOCKS) * 2)):
        text = f"{row['strategy']} x{row['devices']}, seed {row['seed']}, epoch {row['epoch']}"
        mark(axes, number(row[clock]), number(row[value]), f"{text}: {_shown(row, value)}")


def _set_values(axes: Axes, curves: pd.DataFrame, value: str) -> None:
    """Set the axis of a quantity, the same in all its panels: a loss logarithmic if it is positive, accuracy in %."""
    known = curves[value].dropna().astype(float)
    finite = known[np.isfinite(known)]
    if value == "val_accuracy" or finite.empty or finite.min() <= 0:
        linear_values(axes, "y", percent=value == "val_accuracy")
        if len(finite):
            margin = MARGIN * (finite.max() - finite.min()) or MARGIN
            axes.set_ylim(finite.min() - margin, finite.max() + margin)
    else:
        log_values(axes, "y", log_limits([*finite], []))


def _marked(curves: pd.DataFrame, *, few: bool) -> list[Row]:
    """Return the epochs whose values show on hover: all if they are few, else the last of each training."""
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
