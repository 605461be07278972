"""Learning curves, epoch by epoch and step by step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import KEYS, order
from harness.analysis.results import Results
from harness.config.script import CURVE_METRICS
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.drawing import (
    COLOURS,
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
    name_line,
    strategy_legend,
)
from harness.report.figures.scales import linear_values, log_limits, log_values
from harness.report.row import rows_of, settings
from harness.report.tables.scaling import metric_title
from harness.report.tables.text import decimal, span

MOST_POINTS = 500
"""The most steps of a training that are drawn: about as many as a panel has pixels."""
QUANTITIES = {"loss": "training loss", "learning_rate": "learning rate"}
CLOCKS = {"samples": "training samples", "train_s": "training time (s)"}
MARGIN = 0.05
"""Beyond the lowest and the highest value of a linear axis, as a share of what is between them."""
accuracy = decimal("{:.1f} %", 100)


def _trainings(results: Results, values: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the trainings, and their rows of ``values`` with cell, strategy, devices, tags and ``setting``."""
    done = results.trials["outcome"].isin(["ok", "diverged"])
    trials = results.trials[(results.trials["kind"] == "convergence") & done]
    named = trials[[*KEYS, "cell_id", "strategy", "devices", *TAGS]].assign(setting=settings(trials))
    return trials, values.merge(named, on=KEYS, validate="many_to_one")


def _settings_in_order(trials: pd.DataFrame, drawn: pd.DataFrame) -> list[str]:
    """Return the settings that have drawn rows, in the order of tables."""
    pairs = sorted(zip(rows_of(trials), settings(trials), strict=True), key=lambda pair: order(pair[0]))
    known = {*drawn["setting"]}
    return [name for name in dict.fromkeys(name for _, name in pairs) if name in known][:MOST_FACETS]


def losses_by_step(results: Results) -> Drawing:
    """Draw the loss and the learning rate of the steps of each training, one line a seed, one row a setting."""
    title = "Training loss and learning rate, step by step"
    trials, merged = _trainings(results, results.training_steps)
    steps = merged.sort_values([*KEYS, "step"], kind="stable")
    by_training = steps.groupby(KEYS)["step"]
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
            draw_lines(axes, shown, "step", name, KEYS, marked=False)
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
    """Draw a metric against training time, and training loss against samples or time, a row a setting.

    A line is the median of a cell's seeds, epoch by epoch, its band their range; dashed: the target.
    """
    title = "Learning curves, against training time and samples"
    trials, epochs = _trainings(results, results.epochs)
    if epochs.empty:
        return Drawing(title, "Left out: no training was recorded (the file has no convergence section).", None)
    metric = _metric_of(results, epochs)
    counted = "samples" if epochs["samples"].notna().any() else "train_s"
    clocks = dict.fromkeys([(metric, "train_s"), ("train_loss", counted)])
    known = [(value, clock) for value, clock in clocks if value == metric or epochs[value].notna().any()]
    quantities = [(value, metric_title(value), clock) for value, clock in known]
    curves = _over_seeds(epochs, [*dict.fromkeys(value for value, *_ in quantities)])
    differing = results.convergence[results.convergence["excluded"].notna()]
    names = _settings_in_order(trials, curves)
    figure, grid = make_grid(len(names), len(quantities), (WIDTH / 2, PANEL[1]))
    target = None
    if results.target and results.target.metric == metric:
        target = results.target.at_most if results.target.at_least is None else results.target.at_least
    for line, name in zip(grid, names, strict=True):
        part = curves[curves["setting"] == name]
        for axes, (value, label, clock) in zip(line, quantities, strict=True):
            bound = [target] if value == metric and target is not None else []
            ends = [*bound, *curves[f"{value}_low"], *curves[f"{value}_high"]]
            _set_values(axes, pd.Series(ends, dtype=float), percent=value == "val_accuracy", in_all=True)
            linear_values(axes, "x")
            for level in bound:
                axes.axhline(level, color="0.45", linestyle="--", linewidth=1, zorder=1)
            _draw(axes, part, clock, value, {*differing["cell_id"]}, few=len(curves) <= MOST_MARKS // len(quantities))
            axes.set_xlabel(CLOCKS[clock] if line is grid[-1] else "")
            axes.set_ylabel(label)
        if len(names) > 1:
            add_title(line[0], name, "left")
    add_legend(figure, strategy_legend(epochs))
    trained, others = (captions.cells(rows.sort_values(["strategy", "devices"])) for rows in (trials, differing))
    seeds = trials.groupby("cell_id")["seed"].nunique()
    batches = ", ".join(map(str, sorted(trials["global_batch_size"].dropna().astype(int).unique())))
    over = f"Median of {span(str, seeds)} seeds, bands from the lowest to the highest" if seeds.max() > 1 else "1 seed"
    short = trials["outcome"].eq("diverged").any() and seeds.max() > 1
    caption = (
        f"{over}: {trained}; global batch {batches}.{' Dashed: the target.' if target is not None else ''} "
        f"{asked.clock if (asked := results.experiment.convergence) else ''}"
        f"{' A line ends where the first of its seeds diverged.' if short else ''}"
        f"{f' Not equivalent to one device, and hatched: {others}.' if others else ''}"
        f"{captions.set_apart(trials)}{captions.unverified(results.convergence)}"
        f"{captions.cut(names)}"
    )
    return Drawing(title, caption, figure)


def _metric_of(results: Results, epochs: pd.DataFrame) -> str:
    """Return the metric that is drawn: the target's, else accuracy, loss or another of validation, else of training."""
    names = [str(name) for name in epochs.columns if name != "train_s" and epochs[name].notna().any()]
    recorded = [name for start in (*CURVE_METRICS, "train_") for name in names if name.startswith(start)]
    preferred = [*([results.target.metric] if results.target else []), "val_accuracy", "val_loss", *recorded]
    return next((name for name in preferred if name in recorded), "val_loss")


def _over_seeds(epochs: pd.DataFrame, values: list[str]) -> pd.DataFrame:
    """Return one row a cell and epoch that all of its seeds have: the medians, and the ranges of ``values``.

    The ends of a range have the suffixes _low and _high.
    """
    trainings = epochs.groupby("cell_id")["trial_id"].transform("nunique")
    whole = epochs[epochs.groupby(["cell_id", "epoch"])["trial_id"].transform("nunique") == trainings]
    by = whole.groupby(["cell_id", "epoch"], sort=False)
    ends = [by[values].agg(how).add_suffix(end) for how, end in (("min", "_low"), ("max", "_high"))]
    numbers = pd.concat([by[[*CLOCKS, *values]].median(), *ends], axis="columns").astype(float)
    named = epochs.drop_duplicates("cell_id")[["cell_id", "strategy", "devices", *TAGS, "setting"]]
    return numbers.reset_index().merge(named, on="cell_id", validate="many_to_one").sort_values(["cell_id", "epoch"])


def _draw(axes: Axes, part: pd.DataFrame, clock: str, value: str, differing: Collection[str], *, few: bool) -> None:
    """Draw a quantity of one setting against a clock; the last point of the cells that differ is hatched.

    ``few``: whether every epoch shows its value on hover, or the last one of each cell. Lines of one strategy have the
    number of their devices at their end.
    """
    draw_lines(axes, part, clock, value, ["cell_id"])
    counts = part.groupby("strategy")["devices"].nunique()
    if counts.max() > 1:
        axes.margins(x=0.1)  # for the names
    for cell, curve in part.groupby("cell_id", sort=False):
        strategy = str(curve["strategy"].iloc[0])
        colour = COLOURS[strategy]
        axes.fill_between(
            curve[clock], curve[f"{value}_low"], curve[f"{value}_high"], color=colour, alpha=0.15, linewidth=0
        )
        known = curve.dropna(subset=[clock, value])
        if cell in differing and len(known):
            hatch_point(axes, known[clock].iloc[-1], known[value].iloc[-1])
        if counts[strategy] > 1 and len(known):
            name_line(axes, f"x{curve['devices'].iloc[0]}", (known[clock].iloc[-1], known[value].iloc[-1]), strategy)
        form = accuracy if value == "val_accuracy" else "{:.4g}".format
        for row in rows_of(known if few else known[-1:]):
            low, high = form(row[f"{value}_low"]), form(row[f"{value}_high"])
            span = f" ({low} to {high})" if low != high else ""
            text = f"{row.strategy} x{row.devices}, epoch {row.epoch}: {form(row[value])}{span}"
            mark(axes, row[clock], row[value], text)
