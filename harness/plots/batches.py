"""Throughput of a device and memory against the batch size."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.plots import captions
from harness.plots.common import (
    COLOURS,
    GIB,
    MARKERS,
    MOST_FACETS,
    Drawing,
    Tables,
    add_legend,
    is_apart,
    log2_axis,
    make_grid,
    strategy_legend,
)


def batch_sizes(tables: Tables) -> Drawing:
    """Per-device throughput and peak memory against the per-device batch, with marks where none was measured."""
    name, title = "batch_sizes", "Per-device throughput and peak memory against batch size"
    rows = tables.cells
    if rows["per_device_batch_size"].nunique() < 2:
        return Drawing(name, title, "Left out: one batch size was measured, so there is nothing to compare.", None)
    models = list(dict.fromkeys(rows["model"].fillna("model")))[:MOST_FACETS]
    figure, grid = make_grid(2, len(models))
    failed = _without_result(tables.trials)
    for column, model in enumerate(models):
        part = rows[rows["model"].fillna("model") == model]
        lost = failed[failed["model"].fillna("model") == model]
        for row, (value, scale, label) in enumerate(
            [
                ("per_device_per_s", 1.0, "throughput of one device (samples/s)"),
                ("peak_memory_bytes", 1.0 / GIB, "peak memory of a rank (GiB)"),
            ]
        ):
            axes = grid[row][column]
            _batch_lines(axes, part, value, scale)
            axes.set_ylim(bottom=0)
            log2_axis(axes, pd.concat([part["per_device_batch_size"], lost["per_device_batch_size"]]))
            for batch in sorted(lost["per_device_batch_size"].dropna().unique()):
                axes.plot(batch, 0, marker="x", color="crimson", markersize=8, clip_on=False, zorder=5)
            axes.set_xlabel("per-device batch size (samples)")
            axes.set_ylabel(label if column == 0 else "")
            axes.set_title(str(model) if row == 0 else "")
    marks = [Line2D([], [], marker="x", linestyle="", color="crimson", label="not measured")] if len(failed) else []
    add_legend(figure, [*strategy_legend(rows), *marks])
    caption = (
        f"Each point is one cell; lines join cells of one strategy and device count (number beside the line). "
        f"Memory: {captions.memory(rows)}. {captions.failures(failed)}{captions.set_apart(rows)}"
    )
    return Drawing(name, title, caption, figure)


def _batch_lines(axes: Axes, part: pd.DataFrame, value: str, scale: float) -> None:
    for (strategy, devices, *_), group in part.groupby(["strategy", "devices", "emulated", "oversubscribed"]):
        ordered = group.sort_values("per_device_batch_size")
        apart = is_apart(ordered.iloc[0])
        x = ordered["per_device_batch_size"].astype(float)
        y = ordered[value].astype(float) * scale
        colour = COLOURS[str(strategy)]
        axes.plot(
            x,
            y,
            color=colour,
            marker=MARKERS[str(strategy)],
            markerfacecolor="white" if apart else colour,
            linestyle=":" if apart else "-",
            linewidth=1.2,
        )
        axes.annotate(
            str(devices), (x.iloc[-1], y.iloc[-1]), xytext=(6, -3), textcoords="offset points", color=colour, fontsize=8
        )


def _without_result(trials: pd.DataFrame) -> pd.DataFrame:
    """Throughput trials of cells that gave no figure, by their own fault or for want of memory."""
    bad = trials["outcome"].isin(["oom", "error", "timeout", "lost", "diverged"])
    memory = (trials["outcome"] == "skipped") & trials["reason"].fillna("").str.contains("memory")
    exceeds = (trials["outcome"] == "skipped") & trials["reason"].fillna("").str.contains("exceeds")
    return trials[(trials["kind"] == "throughput") & (bad | memory | exceeds)]
