"""Efficiency loss of each cell by part: a waterfall from the ideal to the measured efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.common import COLOURS, MOST_FACETS, Drawing, panels
from harness.report.row import is_apart, is_missing, number, rows_of

ROW_HEIGHT = 0.27


def efficiency_waterfall(results: Results) -> Drawing:
    """Draw a panel for each cell on several devices: each part starts at the end of the part before it."""
    title = "Efficiency loss by part"
    rows = results.waterfall
    if rows.empty:
        return Drawing(title, "Left out: no cell on several devices has the trials that explain it.", None)
    rows = rows.assign(facet=[f"{row['label']}{'*' * is_apart(row)}" for row in rows_of(rows)])
    facets = [(str(facet), part) for facet, part in islice(rows.groupby("facet", sort=False), MOST_FACETS)]
    tallest = max(len(part) for _, part in facets)
    figure = panels(facets, _draw, legend=[], height=1.1 + ROW_HEIGHT * (tallest + 1))
    caption = (
        "From 100 % down to the cell's efficiency: each bar is the share of the step that a part takes, "
        f"hatched if it is a gain; thin lines are 95 % intervals over blocks{captions.no_interval(rows)}, "
        f"{captions.count(rows)}. Side by side: the same step on all "
        "devices at once, nothing exchanged. dp's and fsdp's collectives: the time in which nothing is computed "
        f"meanwhile, from profiled steps.{_graph_search(rows)}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _graph_search(rows: pd.DataFrame) -> str:
    known = (options for options in rows["options"] if isinstance(options, Mapping))
    if not any(options.get("ddp.find_unused_parameters") for options in known):
        return ""
    return " With find_unused_parameters its search of the graph is in exposed communication."


def _draw(axes: Axes, part: pd.DataFrame) -> None:
    colour = COLOURS[str(part["strategy"].iloc[0])]
    left = 1.0
    labels, bars = [], rows_of(part)
    ideal = next(row for row in bars if row["part"] == "ideal")
    efficiency = number(ideal["share"])
    lost = [row for row in bars if row["part"] != "ideal"]
    for y, row in enumerate(lost):
        share = number(row["share"])
        end = left - share
        axes.barh(
            y,
            left - end,
            left=end,
            height=0.7,
            color=(*colour, 0.55),
            edgecolor=colour,
            hatch="////" if share < 0 else None,
        )
        if not is_missing(row["low"]):
            axes.plot([left - number(row["high"]), left - number(row["low"])], [y, y], color="0.25", linewidth=1)
        labels.append(f"{row['part']}  {100 * share:.1f} %")
        left = end
    y = len(lost)
    axes.barh(y, efficiency, height=0.7, color=colour)
    if not is_missing(ideal["low"]):
        axes.plot([number(ideal["low"]), number(ideal["high"])], [y, y], color="0.25", linewidth=1)
    labels.append(f"efficiency  {100 * efficiency:.1f} %")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=0)
    axes.set_xlim(min(0.0, left), max(1.05, *(1.0 - number(row["share"]) for row in lost)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
