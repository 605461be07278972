"""Distribution of step times."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.results import Results
from harness.config.strategy_traits import strategy_order
from harness.report.figures import captions
from harness.report.figures.common import (
    COLOURS,
    Drawing,
    axis_label,
    facets_of,
    not_equivalent_cells,
    panels,
)
from harness.report.row import is_apart, rows_of

WHISKERS = (5, 95)


def step_times(results: Results) -> Drawing:
    """Draw the distribution of step times of each cell, over the timed steps of all ranks and blocks."""
    title = "Step time of each cell"
    if results.cells["step_s"].isna().all():
        return Drawing(title, "Left out: no step was timed.", None)
    rows = results.cells.assign(label=[axis_label(row) for row in rows_of(results.cells)])
    rows = rows.assign(order=rows["strategy"].map(strategy_order)).sort_values(["devices", "order"], kind="stable")
    facets = facets_of(rows, own=False)
    not_equivalent = not_equivalent_cells(results)
    by_cell = _milliseconds(results, pd.concat([part["cell_id"] for _, part in facets]))

    def draw(axes: Axes, part: pd.DataFrame) -> None:
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
        for box, row in zip(boxes["boxes"], rows_of(part), strict=True):
            box.set_facecolor((*COLOURS[str(row["strategy"])], 0.15 if is_apart(row) else 0.65))
            box.set_hatch("////" if row["cell_id"] in not_equivalent else None)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("step time (ms)")

    figure = panels(facets, draw, legend=[], height=max(1.8, 0.9 + 0.32 * max(len(part) for _, part in facets)))
    caption = (
        "Boxes: quartiles and median; whiskers: 5th and 95th percentile of every timed step of all ranks and blocks. "
        f"Steps of one trial are not replicates."
        f"{captions.otherwise(not_equivalent, rows)}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _milliseconds(results: Results, cell_ids: pd.Series[str]) -> dict[str, np.ndarray]:
    """Return the timed steps of the throughput trials of these cells, by cell, in ms."""
    trials = results.trials
    known = trials[(trials["outcome"] == "ok") & (trials["kind"] == "throughput") & trials["cell_id"].isin(cell_ids)]
    return {cell_id: 1000 * seconds for cell_id, seconds in results.step_times.of_cells(known).items()}
