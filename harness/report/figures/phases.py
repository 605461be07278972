"""Step time by phase."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.axes import Limits, common_limits, linear_values
from harness.report.figures.chart import mark
from harness.report.figures.common import (
    Drawing,
    axis_label,
    facets_of,
    merge_single_rows,
    not_equivalent_cells,
    panels,
)
from harness.report.row import Row, rows_of

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
