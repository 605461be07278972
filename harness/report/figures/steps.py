"""Distribution of step times, and step time by phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.config.strategy_traits import strategy_order
from harness.report.figures import captions
from harness.report.figures.axes import Limits, common_limits, linear_values
from harness.report.figures.common import (
    COLOURS,
    Drawing,
    axis_label,
    facets_of,
    mark,
    merge_single_rows,
    not_equivalent_cells,
    panels,
)
from harness.report.labels import Row, number, rows_of

WHISKERS = (5, 95)


def step_times(results: Results) -> Drawing:
    """Draw the distribution of step times of each cell, over the timed steps of all ranks and blocks."""
    title = "Step time of each cell"
    rows = results.cells[results.cells["step_s"].notna()]
    if rows.empty:
        return Drawing(title, "Left out: no step was timed.", None)
    rows = rows.assign(label=[axis_label(row) for row in rows_of(rows)])
    rows = rows.assign(order=rows["strategy"].map(strategy_order)).sort_values(["devices", "order"], kind="stable")
    every = facets_of(rows, own=False)
    facets = merge_single_rows(every)
    not_equivalent = not_equivalent_cells(results)
    by_cell = _milliseconds(results, pd.concat([part["cell_id"] for _, part in facets]))

    longest = [1000 * float(part["step_p95_s"].max()) for _, part in facets]
    limits = common_limits([(0.0, 1.05 * most) for most in longest])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends)
        _draw_boxes(axes, part, by_cell, not_equivalent)

    figure = panels(facets, draw, limits, legend=[], bars=True)
    caption = (
        "Boxes: quartiles and median; whiskers: 5th and 95th percentile of every timed step of all ranks and blocks. "
        f"Steps of one trial are not replicates."
        f"{captions.otherwise(not_equivalent, rows)}{captions.set_apart(rows)}"
        f"{captions.scales(limits)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


def _draw_boxes(
    axes: Axes, part: pd.DataFrame, by_cell: Mapping[str, np.ndarray], not_equivalent: frozenset[str]
) -> None:
    # seaborn 0.13's boxplot calls matplotlib in a way that matplotlib 3.13 removes
    boxes = axes.boxplot(
        [by_cell.get(str(cell_id), np.array([np.nan])) for cell_id in part["cell_id"]],
        tick_labels=part["label"].tolist(),
        orientation="horizontal",
        whis=WHISKERS,
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        medianprops={"color": "black"},
    )
    for y, (box, row) in enumerate(zip(boxes["boxes"], rows_of(part), strict=True), 1):
        box.set_facecolor((*COLOURS[str(row["strategy"])], 0.15 if is_no_claim(row) else 0.65))
        box.set_hatch("////" if row["cell_id"] in not_equivalent else None)
        low, middle, high = (1000 * number(row[name]) for name in ("step_p5_s", "step_s", "step_p95_s"))
        text = f"{row['label']}: {middle:.3g} ms (5th to 95th percentile: {low:.3g} to {high:.3g} ms)"
        mark(axes, low, y, text, x_end=high)
    axes.invert_yaxis()
    axes.set_xlabel("step time (ms)")


def _milliseconds(results: Results, cell_ids: pd.Series[str]) -> dict[str, np.ndarray]:
    """Return the timed steps of the throughput trials of these cells, by cell, in ms."""
    trials = results.trials
    known = trials[(trials["outcome"] == "ok") & (trials["kind"] == "throughput") & trials["cell_id"].isin(cell_ids)]
    return {cell_id: 1000 * seconds for cell_id, seconds in results.step_times.of_cells(known).items()}


NAMES = ("wait", "idle", "copy", "forward", "backward", "optimizer", "rest")
TONES = dict(zip(NAMES, sns.color_palette("Greys", len(NAMES) + 2)[1:-1], strict=True))
"""Shades, not colours: colour means strategy."""
HATCHES = {"wait": "xx", "idle": "..", "copy": "--", "backward": "//"}


def step_phases(results: Results) -> Drawing:
    """Draw the time of a step by phase, stacked, one bar a cell."""
    title = "Step time by phase"
    if results.phases.empty:
        return Drawing(title, "Left out: no phases were recorded.", None)
    not_equivalent = not_equivalent_cells(results)
    rows = results.phases.assign(label=[_label(row, not_equivalent) for row in rows_of(results.phases)])
    every = facets_of(rows, own=False)
    facets = merge_single_rows(every)
    present = [phase for phase in NAMES if rows[f"{phase}_s"].fillna(0).gt(0).any()]
    columns = [f"{phase}_s" for phase in present]
    longest = [1000 * float(part[columns].fillna(0).sum(axis=1).max()) for _, part in facets]
    limits = common_limits([(0.0, 1.05 * most) for most in longest])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends)
        _draw_bars(axes, part, present)

    handles = [
        Patch(facecolor=TONES[phase], hatch=HATCHES.get(phase), edgecolor="0.25", label=phase) for phase in present
    ]
    figure = panels(facets, draw, limits, legend=handles, bars=True)
    clock = "the GPU's stream, partitioned by events" if (rows["device"] == "cuda").any() else "the host's clock"
    caption = (
        f"Mean over ranks and blocks, by {clock}; the phases add up to the step. Backward includes "
        f"the communication that it waits for.{captions.set_apart(rows)}"
        f"{captions.scales(limits)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


def _draw_bars(axes: Axes, part: pd.DataFrame, phases: Sequence[str]) -> None:
    """Draw the phases of each row side by side."""
    left = np.zeros(len(part))
    for phase in phases:
        width = part[f"{phase}_s"].fillna(0).astype(float).to_numpy() * 1000
        axes.barh(
            range(len(part)),
            width,
            left=left,
            height=0.7,
            color=TONES[phase],
            hatch=HATCHES.get(phase),
            edgecolor="0.25",
            linewidth=0.4,
        )
        for y, (label, start, wide) in enumerate(zip(part["label"], left, width, strict=True)):
            if wide > 0:
                mark(axes, start, y, f"{label}, {phase}: {wide:.3g} ms", x_end=start + wide)
        left += width
    axes.set_yticks(range(len(part)), part["label"].tolist())
    axes.invert_yaxis()
    axes.set_xlabel("step time (ms)")


def _label(row: Row, not_equivalent: Collection[str]) -> str:
    differs = " (not equivalent)" if row["cell_id"] in not_equivalent else ""
    return f"{axis_label(row)}{differs}"
