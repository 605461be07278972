"""Distribution of step times, and step time by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.config.strategy_traits import strategy_order
from harness.report.figures import captions
from harness.report.figures.drawing import (
    COLOURS,
    Drawing,
    Facet,
    axis_label,
    facets_of,
    mark,
    merge_single_rows,
    not_equivalent_cells,
    panels,
)
from harness.report.figures.scales import Limits, common_limits, linear_values
from harness.report.row import number, rows_of

WHISKERS = (5, 95)
NAMES = ("wait", "idle", "copy", "forward", "backward", "optimizer", "rest")
TONES = dict(zip(NAMES, sns.color_palette("Greys", len(NAMES) + 2)[1:-1], strict=True))
"""Shades, not colours: colour means strategy."""
HATCHES = {"wait": "xx", "idle": "..", "copy": "--", "backward": "//"}


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
    trials = results.trials[(results.trials["outcome"] == "ok") & (results.trials["kind"] == "throughput")]
    drawn = trials[trials["cell_id"].isin(pd.concat([part["cell_id"] for _, part in facets]))]
    by_cell = results.step_times.of_cells(drawn)

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        _draw_boxes(axes, part, by_cell, not_equivalent)

    figure, limits = _step_panels(facets, draw, [float(part["step_p95_s"].max()) for _, part in facets])
    caption = (
        "Boxes: quartiles and median; whiskers: 5th and 95th percentile of every timed step of all ranks and blocks. "
        f"Steps of one trial are not replicates."
        f"{captions.hatch_note(not_equivalent, rows)}{captions.set_apart(rows)}"
        f"{captions.scales(limits)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


def _step_panels(
    facets: Sequence[Facet],
    draw: Callable[[Axes, pd.DataFrame], None],
    longest_s: Sequence[float],
    legend: Sequence[Artist] = (),
) -> tuple[Figure, list[Limits]]:
    """Draw bars of step times in milliseconds, one a row; ``longest_s``: the longest of each facet."""
    limits = common_limits([(0.0, 1.05 * 1000 * longest) for longest in longest_s])

    def draw_panel(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends)
        draw(axes, part)
        axes.invert_yaxis()
        axes.set_xlabel("step time (ms)")

    return panels(facets, draw_panel, limits, legend=legend, bars=True), limits


def _draw_boxes(
    axes: Axes, part: pd.DataFrame, by_cell: Mapping[str, np.ndarray], not_equivalent: frozenset[str]
) -> None:
    # seaborn 0.13's boxplot calls matplotlib in a way that matplotlib 3.13 removes
    boxes = axes.boxplot(
        [1000 * by_cell.get(str(cell_id), np.array([np.nan])) for cell_id in part["cell_id"]],
        tick_labels=part["label"].tolist(),
        orientation="horizontal",
        whis=WHISKERS,
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        medianprops={"color": "black"},
    )
    for y, (box, row) in enumerate(zip(boxes["boxes"], rows_of(part), strict=True), 1):
        box.set_facecolor((*COLOURS[row.strategy], 0.15 if is_no_claim(row) else 0.65))
        box.set_hatch("////" if row.cell_id in not_equivalent else None)
        low, middle, high = (1000 * number(value) for value in (row.step_p5_s, row.step_s, row.step_p95_s))
        text = f"{row.label}: {middle:.3g} ms (5th to 95th percentile: {low:.3g} to {high:.3g} ms)"
        mark(axes, low, y, text, x_end=high)


def step_phases(results: Results) -> Drawing:
    """Draw the time of a step by phase, stacked, one bar a cell."""
    title = "Step time by phase"
    rows = results.phases
    if rows.empty:
        return Drawing(title, "Left out: no phases were recorded.", None)
    not_equivalent = not_equivalent_cells(results)
    labels = [f"{axis_label(row)}{' (not equivalent)' * (row.cell_id in not_equivalent)}" for row in rows_of(rows)]
    rows = rows.assign(label=labels)
    every = facets_of(rows, own=False)
    facets = merge_single_rows(every)
    present = [phase for phase in NAMES if rows[f"{phase}_s"].fillna(0).gt(0).any()]
    columns = [f"{phase}_s" for phase in present]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        _draw_bars(axes, part, present)

    handles = [
        Patch(facecolor=TONES[phase], hatch=HATCHES.get(phase), edgecolor="0.25", label=phase) for phase in present
    ]
    longest_s = [float(part[columns].fillna(0).sum(axis=1).max()) for _, part in facets]
    figure, limits = _step_panels(facets, draw, longest_s, handles)
    clock = "the GPU's stream, partitioned by events" if (rows["device"] == "cuda").any() else "the host's clock"
    caption = (
        f"Mean over ranks and blocks, by {clock}; the phases add up to the step. Backward includes "
        f"the communication that it waits for.{captions.set_apart(rows)}"
        f"{captions.scales(limits)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


def _draw_bars(axes: Axes, part: pd.DataFrame, phases: Sequence[str]) -> None:
    """Draw the phases of each row side by side."""
    left, labels = np.zeros(len(part)), part["label"].tolist()
    for phase in phases:
        width = part[f"{phase}_s"].fillna(0).astype(float).to_numpy() * 1000
        look = {"color": TONES[phase], "hatch": HATCHES.get(phase), "edgecolor": "0.25", "linewidth": 0.4}
        axes.barh(range(len(part)), width, left=left, height=0.7, **look)
        for y, (label, start, wide) in enumerate(zip(labels, left, width, strict=True)):
            if wide > 0:
                mark(axes, start, y, f"{label}, {phase}: {wide:.3g} ms", x_end=start + wide)
        left += width
    axes.set_yticks(range(len(part)), labels)
