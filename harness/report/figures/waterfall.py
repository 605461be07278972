"""Efficiency loss of each cell by part: a waterfall from the ideal to the measured efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.analysis.waterfall import COMMUNICATION, MOST_REST, PARTS
from harness.report.figures import captions
from harness.report.figures.drawing import COLOURS, Drawing, mark, panels
from harness.report.figures.scales import Limits, draw_interval, linear_values
from harness.report.row import number, rows_of
from harness.report.tables.text import decimal, estimate

MOST_CELLS = 6
"""The most panels of a figure: the report has the first figure, the folder the others too."""
MOST_FIGURES = 5
"""The most figures, so that a run of many cells has its report in time; the table has every cell."""
ROW_HEIGHT = 0.24
EFFICIENCY = "efficiency"
ROW_OF = {name: part.row or name for name, part in PARTS.items()}
"""The row of each part; a strategy without the parts of a row has it empty."""
share = decimal("{:.1f} %", 100)


def efficiency_waterfall(results: Results) -> Drawing:
    """Draw a panel for each cell on several devices: each part starts at the end of the part before it.

    The cells in the order of their importance: those that the verdict names, in its order; then the largest losses,
    emulated and oversubscribed cells last. Every cell has the same rows.
    """
    title = "Efficiency loss by part"
    rows = results.waterfall
    if rows.empty:
        return Drawing(title, "Left out: no cell on several devices has the trials that explain it.", None)
    by_cell = rows.groupby("cell_id")
    withheld = (by_cell["part"].transform("size") == len(("ideal", "rest"))) & (
        by_cell["reason"].transform("count") > 0
    )
    labels = ", ".join(map(str, rows.loc[withheld, "label"].drop_duplicates()))
    most = f"{100 * MOST_REST:.0f} %"
    left_out = f" Withheld, since their parts leave over {most} of the step unexplained: {labels}." if labels else ""
    rows = rows[~withheld]
    if rows.empty:
        return Drawing(title, f"Left out:{left_out}", None)
    cells = _by_importance(rows, results.verdict)
    names = [row for row in dict.fromkeys(ROW_OF.values()) if row in {*rows["part"].replace(ROW_OF)}]
    starts = range(0, len(cells), MOST_CELLS)[:MOST_FIGURES]
    figures = [_figure(cells[start : start + MOST_CELLS], names) for start in starts]
    caption = (
        "From 100 % down to the cell's efficiency: each bar is the share of the step that a part takes, "
        f"hatched if it is a gain; thin lines are 95 % intervals over blocks{captions.no_interval(rows)}, "
        f"{captions.count(rows)}, an arrow at ends beyond the axis. Side by side: the same step on all devices "
        f"at once, nothing exchanged. {_communication(rows)}{_graph_search(rows)}{captions.set_apart(rows)}"
        f"{_choice(len(cells))}{left_out}"
    )
    return Drawing(title, caption, figures[0], figures[1:])


def _by_importance(rows: pd.DataFrame, verdict: pd.DataFrame) -> list[pd.DataFrame]:
    named = list(dict.fromkeys(verdict["cell_id"].dropna()))

    def importance(cell: pd.DataFrame) -> tuple[int, bool, float]:
        first = rows_of(cell[cell.part == "ideal"])[0]
        place = named.index(first.cell_id) if first.cell_id in named else len(named)
        return place, is_no_claim(first), first.share

    return sorted((part for _, part in rows.groupby("cell_id", sort=False)), key=importance)


def _choice(cells: int) -> str:
    """Return a sentence on the order and, if not all of the cells are drawn, on where the others are."""
    order = " Cells that the verdict names come first, then the largest losses."
    if cells <= MOST_CELLS:
        return order if cells > 1 else ""
    others = "waterfall_2 and so on in figures/"
    return f"{order} The first {MOST_CELLS} of {cells} cells; others: {others}, tables/waterfall.csv has all."


def _communication(rows: pd.DataFrame) -> str:
    """Return a sentence on what the row of communication holds for each strategy that was drawn."""
    held = rows[rows["part"].replace(ROW_OF) == COMMUNICATION].groupby("strategy", sort=False)["part"].unique()
    if held.empty:
        return ""
    each = "; ".join(f"{strategy}: {', '.join(map(str, parts))}" for strategy, parts in held.items())
    threads = " The threads of dp are its wrapper." if rows["part"].eq("threads").any() else ""
    return f"Communication is the time in which nothing is computed meanwhile ({each}).{threads}"


def _graph_search(rows: pd.DataFrame) -> str:
    known = (options for options in rows["options"] if isinstance(options, Mapping))
    if not any(options.get("ddp.find_unused_parameters") for options in known):
        return ""
    return " With find_unused_parameters its search of the graph is in exposed communication."


def _figure(cells: Sequence[pd.DataFrame], names: Sequence[str]) -> Figure:
    facets = [(f"{row.label}{'*' * is_no_claim(row)}", cell) for cell in cells for row in rows_of(cell[:1])]
    lefts = [1.0 - number(end) for cell in cells for end in cell[cell.part != "ideal"]["share"].cumsum()]
    limits = min(0.0, *lefts), max(1.05, *lefts)

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends, percent=True, steps=3)
        _draw(axes, part, ends, names)

    height = 0.7 + ROW_HEIGHT * (len(names) + 1)
    return panels(facets, draw, [limits] * len(facets), legend=[], height=height)


def _draw(axes: Axes, part: pd.DataFrame, limits: Limits, names: Sequence[str]) -> None:
    left, last = 1.0, len(names)
    for row in sorted(rows_of(part), key=lambda row: bool(row.part == "ideal")):
        colour = COLOURS[row.strategy]
        text = estimate(share, row, "share")
        if row.part == "ideal":
            axes.barh(last, row.share, height=0.7, color=colour)
            draw_interval(axes, "x", last, (row.low, row.high), limits, "0.25")
            mark(axes, 0.0, last, f"efficiency: {text}", x_end=row.share)
            continue
        y, start = names.index(ROW_OF.get(row.part, row.part)), left - row.share
        hatch = "////" if row.share < 0 else None
        axes.barh(y, row.share, left=start, height=0.7, color=(*colour, 0.55), edgecolor=colour, hatch=hatch)
        draw_interval(axes, "x", y, (left - number(row.high), left - number(row.low)), limits, "0.25")
        mark(axes, start, y, f"{row.part}: {text}", x_end=left)
        left = start
    sums = part["share"].groupby(part["part"].replace(ROW_OF)).sum().to_dict()
    for y, name in enumerate([*names, "ideal"]):
        text = share(sums[name]) if name in sums else "-"
        axes.text(1.05, y, text, transform=axes.get_yaxis_transform(), verticalalignment="center")
    axes.set_yticks(range(len(names) + 1), [*names, EFFICIENCY])
    axes.set_ylim(len(names) + 0.6, -0.6)
    axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=0)
