"""Step time by phase."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.common import Drawing, axis_label, facets_of, not_equivalent_cells, panels
from harness.report.row import Row, rows_of

NAMES = ("wait", "idle", "copy", "forward", "backward", "optimizer", "rest")
TONES = dict(zip(NAMES, sns.color_palette("Greys", len(NAMES) + 2)[1:-1], strict=True))
"""Shades, not colours: colour means strategy."""
HATCHES = {"wait": "xx", "idle": "..", "copy": "--", "backward": "//"}


def step_phases(results: Results) -> Drawing:
    """Draw the time of a step by phase, stacked, one bar a cell."""
    title = "Step time by phase"
    rows = results.phases
    if rows.empty:
        return Drawing(title, "Left out: no phases were recorded.", None)
    not_equivalent = not_equivalent_cells(results)
    facets = facets_of(rows, own=False)
    present = [phase for phase in NAMES if rows[f"{phase}_s"].fillna(0).gt(0).any()]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        left = np.zeros(len(part))
        for phase in present:
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
            left += width
        axes.set_yticks(range(len(part)), [_label(row, not_equivalent) for row in rows_of(part)])
        axes.invert_yaxis()
        axes.set_xlabel("step time (ms)")

    handles = [
        Patch(facecolor=TONES[phase], hatch=HATCHES.get(phase), edgecolor="0.25", label=phase) for phase in present
    ]
    figure = panels(facets, draw, legend=handles, height=max(1.8, 0.9 + 0.32 * max(len(part) for _, part in facets)))
    clock = "the GPU's stream, partitioned by events" if (rows["device"] == "cuda").any() else "the host's clock"
    caption = (
        f"Mean over ranks and blocks, by {clock}; the phases add up to the step. Backward includes "
        f"the communication that it waits for.{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _label(row: Row, not_equivalent: Collection[str]) -> str:
    differs = " (not equivalent)" if row["cell_id"] in not_equivalent else ""
    return f"{axis_label(row)}{differs}"
