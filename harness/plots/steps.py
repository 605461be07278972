"""How step times are spread."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.plots import captions
from harness.plots.common import (
    COLOURS,
    Drawing,
    Tables,
    facets_of,
    is_apart,
    panels,
)


def step_times(tables: Tables) -> Drawing:
    """How the step time of each cell is spread: every timed step of every rank and block."""
    name, title = "step_times", "Step time of each cell"
    timed = tables.steps[~tables.steps["warmup"]]
    known = tables.trials[tables.trials["outcome"] == "ok"][["trial_id", "attempt", "cell_id"]]
    timed = timed.merge(known, on=["trial_id", "attempt"], validate="many_to_one")
    if timed.empty:
        return Drawing(name, title, "Left out: no step was timed.", None)
    rows = tables.cells
    facets = facets_of(rows)
    milliseconds = timed.assign(step_ms=timed["step_s"].astype(float) * 1000)
    by_cell = {str(key): group["step_ms"].to_numpy() for key, group in milliseconds.groupby("cell_id")}

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        part = part.sort_values(["devices", "strategy"])
        data = [by_cell.get(str(cell_id), np.array([np.nan])) for cell_id in part["cell_id"]]
        boxes = axes.boxplot(
            data, orientation="horizontal", whis=(5, 95), showfliers=False, patch_artist=True, widths=0.6
        )
        for box, (_, row) in zip(boxes["boxes"], part.iterrows(), strict=True):
            box.set_facecolor((*COLOURS[row["strategy"]], 0.15 if is_apart(row) else 0.65))
        for median in boxes["medians"]:
            median.set_color("black")
        labels = [f"{row['strategy']} x{row['devices']}{'*' * is_apart(row)}" for _, row in part.iterrows()]
        axes.set_yticks(range(1, len(labels) + 1), labels)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("step time (ms)")

    figure = panels(facets, draw, legend=[], height=0.9 + 0.32 * max(len(part) for _, part in facets))
    starred = " * " if captions.rows_apart(rows) else ""
    caption = (
        "Boxes: quartiles and median; whiskers: 5th and 95th percentile of every timed step of all ranks and blocks. "
        f"Steps of one trial are not replicates.{starred}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(name, title, caption, figure)
