"""Throughput of a device and memory against the batch size."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.common import (
    COLOURS,
    Drawing,
    add_legend,
    draw_lines,
    facets_of,
    hatch_point,
    log2_axis,
    make_grid,
    not_equivalent_cells,
    strategy_legend,
)
from harness.report.labels import rate_unit
from harness.report.row import number, rows_of
from harness.system.units import GIB

BATCH = "per_device_batch_size"
SPEED = "per_device_per_s"
QUANTITIES = ((SPEED, "throughput of one device"), ("peak_gib", "peak memory of a rank"))
LINES = ("devices", "device_ids", "nodes", "emulated", "oversubscribed")


def batch_sizes(results: Results) -> Drawing:
    """Draw per-device throughput and peak memory against the per-device batch; crosses: no result."""
    title = "Per-device throughput and peak memory against batch size"
    rows = results.cells.assign(peak_gib=results.cells["peak_memory_bytes"] / GIB)
    if rows[BATCH].nunique() < 2:
        return Drawing(title, "Left out: only one batch size was measured.", None)
    not_equivalent = not_equivalent_cells(results)
    failed = _without_result(results.trials)
    facets = facets_of(rows, batch=False)
    figure, grid = make_grid(2, len(facets))
    for column, (facet, part) in enumerate(facets):
        lost = failed[failed["model"].fillna("").isin(part["model"].fillna(""))]
        for axes, (value, label) in zip([line[column] for line in grid], QUANTITIES, strict=True):
            _panel(axes, part, lost, value)
            if value == SPEED:
                _add_intervals(axes, part)
            for row in rows_of(part[part["cell_id"].isin(not_equivalent) & part[value].notna()]):
                hatch_point(axes, number(row[BATCH]), number(row[value]))
            unit = "GiB" if value == "peak_gib" else rate_unit(rows)
            axes.set_ylabel(f"{label} ({unit})" if column == 0 else "")
        grid[0][column].set_title(facet, y=1.0, parse_math=False)
    marks = [Line2D([], [], marker="x", linestyle="", color="crimson", label="not measured")] if len(failed) else []
    add_legend(figure, [*strategy_legend(rows), *marks])
    caption = (
        f"Each point is one cell, {captions.count(rows)}; bars are 95 % intervals of its throughput"
        f"{captions.no_interval(rows)}; lines join cells of one strategy and device count (beside the line). "
        f"Memory: {captions.memory(rows)}. {captions.failures(failed)}"
        f"{captions.otherwise(not_equivalent, rows)}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _panel(axes: Axes, part: pd.DataFrame, lost: pd.DataFrame, value: str) -> None:
    draw_lines(axes, part, BATCH, value, LINES)
    for (strategy, devices, *_), group in part.groupby(["strategy", *LINES], dropna=False):
        last = group.sort_values(BATCH).iloc[-1]
        if not pd.isna(last[value]):
            axes.annotate(
                str(devices),
                (float(last[BATCH]), float(last[value])),
                xytext=(7, -3),
                textcoords="offset points",
                color=COLOURS[str(strategy)],
                fontsize=8,
            )
    for batch in sorted(lost[BATCH].dropna().unique()):
        axes.plot(batch, 0, marker="x", color="crimson", markersize=8, clip_on=False, zorder=5)
    highest = part[value].max()
    axes.set_ylim(0, 1 if pd.isna(highest) else 1.15 * float(highest))
    log2_axis(axes, pd.concat([part[BATCH], lost[BATCH]]))
    axes.set_xlabel("per-device batch size (samples)")


def _add_intervals(axes: Axes, part: pd.DataFrame) -> None:
    """Draw the intervals of per-device throughput: the cell's interval over its devices."""
    known = part[part["low"].notna()]
    if len(known):
        highest = float((known["high"] / known["devices"]).max())
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * highest))
    for strategy, rows in known.groupby("strategy"):
        low, high = (rows[end].astype(float) / rows["devices"] for end in ("low", "high"))
        axes.vlines(rows[BATCH].astype(float), low, high, color=COLOURS[str(strategy)], linewidth=1, alpha=0.6)


def _without_result(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the throughput trials without a result: failed, or skipped for lack of memory or samples."""
    bad = trials["outcome"].isin(["oom", "error", "timeout", "lost", "diverged"])
    skipped = trials["skip_code"].isin(["out_of_memory", "doctor_memory", "too_few_samples"])
    return trials[(trials["kind"] == "throughput") & (bad | skipped)]
