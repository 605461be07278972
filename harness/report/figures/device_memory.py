"""Peak memory of each GPU: the first one against the others."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.axes import Limits, linear_values
from harness.report.figures.chart import mark
from harness.report.figures.common import COLOURS, Drawing, draw_lines, facets_of, panels, strategy_legend
from harness.report.labels import cell_label
from harness.report.row import number, rows_of
from harness.system.units import GIB


def memory_by_gpu(results: Results) -> Drawing:
    """Draw the peak memory of each GPU of the cells on several, in the order of the cell's GPUs."""
    title = "Peak memory of each GPU"
    rows = results.device_memory
    rows = rows[rows["devices"] > 1]
    if rows.empty:
        return Drawing(title, "Left out: no memory was measured on several GPUs.", None)
    rows = rows.assign(gib=rows["allocated_bytes"] / GIB)
    facets = facets_of(rows)
    limits = (0.0, 1.1 * float(rows["gib"].max()))
    figure = panels(facets, _draw, [limits] * len(facets), legend=strategy_legend(rows))
    caption = (
        "Memory allocated in the steps, largest over the blocks, of each GPU of a cell, in their order; lines join the "
        "GPUs of one cell, whose number stands beside the last. Under dp, GPU 0 also holds the gathered outputs and "
        f"gradients, and the optimizer's state.{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
    linear_values(axes, "y", ends)
    draw_lines(axes, part, "gpu", "gib", ["cell_id"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for row in rows_of(part):
        place, value = number(row["gpu"]), number(row["gib"])
        mark(axes, place, value, f"{cell_label(row)}, GPU {row['gpu']} ({row['name']}): {value:.3g} GiB")
        if place == number(row["devices"]) - 1:
            colour = COLOURS[str(row["strategy"])]
            axes.annotate(str(row["devices"]), (place, value), xytext=(7, -3), textcoords="offset points", color=colour)
    axes.set_xlabel("GPU of the cell")
    axes.set_ylabel("peak memory (GiB)")
