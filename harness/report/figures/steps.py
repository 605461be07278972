"""Where the time of a step goes: its distribution, its phases, and the efficiency loss by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.analysis.waterfall import COMMUNICATION, MOST_REST, ROW_OF
from harness.config.strategy_traits import strategy_order
from harness.report.figures import captions
from harness.report.figures.drawing import (
    COLOURS,
    Chart,
    Drawing,
    Facet,
    axis_label,
    facets_of,
    mark,
    merge_single_rows,
    not_equivalent_cells,
    panels,
)
from harness.report.figures.scales import Limits, common_limits, draw_interval, linear_values
from harness.report.row import number, rows_of
from harness.report.tables.text import decimal, estimate, percent

WHISKERS = (5, 95)
NAMES = ("wait", "idle", "copy", "forward", "backward", "optimizer", "rest")
TONES = dict(zip(NAMES, sns.color_palette("Greys", len(NAMES) + 2)[1:-1], strict=True))
"""Shades, not colours: colour means strategy."""
HATCHES = {"wait": "xx", "idle": "..", "copy": "--", "backward": "//"}

LEADING_CELLS, MOST_CELLS = 2, 6
"""The panels of the first figure, and the most of each other one: the page has two figures, the folder all of them."""
MOST_FIGURES = 5
"""The most figures, so that a run of many cells has its report in time; the table has every cell."""
ROW_HEIGHT = 0.24
"""The row of each part; a strategy without the parts of a row has it empty."""
share = decimal("{:.1f} %", 100)


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
    by_cell = results.step_times.of_cells(drawn, "step_s")
    longest_s = [float(part["step_p95_s"].max()) for _, part in facets]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
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

    figure, limits = _step_panels(facets, draw, longest_s)
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
) -> tuple[Chart, list[Limits]]:
    """Draw bars of step times in milliseconds, one a row; ``longest_s``: the longest of each facet."""
    limits = common_limits([(0.0, 1.05 * 1000 * longest) for longest in longest_s])

    def draw_panel(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends)
        draw(axes, part)
        axes.invert_yaxis()
        axes.set_xlabel("step time (ms)")

    return panels(facets, draw_panel, limits, legend=legend, bars=True), limits


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
    handles = [
        Patch(facecolor=TONES[phase], hatch=HATCHES.get(phase), edgecolor="0.25", label=phase) for phase in present
    ]
    longest_s = [float(part[columns].fillna(0).sum(axis=1).max()) for _, part in facets]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        left, labels = np.zeros(len(part)), part["label"].tolist()
        for phase in present:
            width = part[f"{phase}_s"].fillna(0).astype(float).to_numpy() * 1000
            look = {"color": TONES[phase], "hatch": HATCHES.get(phase), "edgecolor": "0.25", "linewidth": 0.4}
            axes.barh(range(len(part)), width, left=left, height=0.7, **look)
            for y, (label, start, wide) in enumerate(zip(labels, left, width, strict=True)):
                if wide > 0:
                    mark(axes, start, y, f"{label}, {phase}: {wide:.3g} ms", x_end=start + wide)
            left += width
        axes.set_yticks(range(len(part)), labels)

    figure, limits = _step_panels(facets, draw, longest_s, handles)
    clock = "the GPU's stream, partitioned by events" if (rows["device"] == "cuda").any() else "the host's clock"
    caption = (
        f"Mean over ranks and blocks, by {clock}; the phases add up to the step. Backward includes "
        f"the communication that it waits for.{captions.set_apart(rows)}"
        f"{captions.scales(limits)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


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
    only_ends = by_cell["part"].transform("size") == len(("ideal", "rest"))
    withheld = only_ends & (by_cell["reason"].transform("count") > 0)
    labels = ", ".join(map(str, rows.loc[withheld, "label"].drop_duplicates()))
    most = f"{100 * MOST_REST:.0f} %"
    left_out = f" Withheld, since their parts leave over {most} of the step unexplained: {labels}." if labels else ""
    rows = rows[~withheld]
    if rows.empty:
        return Drawing(title, f"Left out:{left_out}", None)
    rows = rows.assign(bar=rows["part"].replace(ROW_OF))
    cells = _by_importance(rows, results.verdict)
    names = [bar for bar in dict.fromkeys(ROW_OF.values()) if bar in {*rows["bar"]}]
    starts = [0, *range(LEADING_CELLS, len(cells), MOST_CELLS)][:MOST_FIGURES]
    draw, height = partial(_draw_parts, names=names), 0.7 + ROW_HEIGHT * (len(names) + 1)
    figures: list[Chart] = []
    for some in (cells[start : start + MOST_CELLS] if start else cells[:LEADING_CELLS] for start in starts):
        facets = [(f"{row.label}{'*' * is_no_claim(row)}", cell) for cell in some for row in rows_of(cell[:1])]
        lefts = [1.0 - number(end) for cell in some for end in cell[cell.part != "ideal"]["share"].cumsum()]
        limits = min(0.0, *lefts), max(1.05, *lefts)
        limits_of_all, columns = [limits] * len(facets), 3 if figures else 1
        figures.append(panels(facets, draw, limits_of_all, legend=[], height=height, most_columns=columns))
    caption = (
        "From 100 % down to the cell's efficiency: each bar is the share of the step that a part takes, "
        f"hatched if it is a gain; thin lines are 95 % intervals over blocks{captions.no_interval(rows)}, "
        f"{captions.count(rows)}, an arrow at ends beyond the axis. Contention: the same step on all devices "
        f"at once, nothing exchanged. {_communication(rows)}{_graph_search(rows)}{_two_measurements(rows)}"
        f"{captions.set_apart(rows)}"
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
    if cells <= (shown := LEADING_CELLS + MOST_CELLS):
        return order if cells > 1 else ""
    others = "waterfall_3 and so on in figures/"
    return f"{order} The first {shown} of {cells} cells; others: {others}, tables/waterfall.csv has all."


def _communication(rows: pd.DataFrame) -> str:
    """Return a sentence on what the row of communication holds for each strategy that was drawn."""
    held = rows[rows["bar"] == COMMUNICATION].groupby("strategy", sort=False)["part"].unique()
    if held.empty:
        return ""
    each = "; ".join(f"{strategy}: {', '.join(map(str, parts))}" for strategy, parts in held.items())
    threads = " The threads of dp are its wrapper overhead." if rows["part"].eq("threads").any() else ""
    return f"Communication is the time that it takes from computing ({each}).{threads}"


def _two_measurements(rows: pd.DataFrame) -> str:
    """Return a sentence on each part that has a second measurement, which contradicts it."""
    found = rows_of(rows[(rows["part"] != "rest") & rows["reason"].notna()])
    each = (f" {row.part} of {row.label}, {percent(row.share)}: {row.reason}." for row in found)
    return "".join(each)


def _graph_search(rows: pd.DataFrame) -> str:
    known = (options for options in rows["options"] if isinstance(options, Mapping))
    if any(options.get("ddp.find_unused_parameters") for options in known):
        return " With find_unused_parameters its search of the graph is in exposed communication, or the exchange."
    return ""


def _draw_parts(axes: Axes, part: pd.DataFrame, limits: Limits, names: Sequence[str]) -> None:
    linear_values(axes, "x", limits, percent=True, steps=3)
    left, last = 1.0, len(names)
    for row in sorted(rows_of(part), key=lambda row: bool(row.part == "ideal")):
        colour = COLOURS[row.strategy]
        text = estimate(share, row, "share")
        if row.part == "ideal":
            axes.barh(last, row.share, height=0.7, color=colour)
            draw_interval(axes, "x", last, (row.low, row.high), limits, "0.25")
            mark(axes, 0.0, last, f"efficiency: {text}", x_end=row.share)
            continue
        y, start = names.index(row.bar), left - row.share
        hatch = "////" if row.share < 0 else None
        axes.barh(y, row.share, left=start, height=0.7, color=(*colour, 0.55), edgecolor=colour, hatch=hatch)
        draw_interval(axes, "x", y, (left - number(row.high), left - number(row.low)), limits, "0.25")
        mark(axes, start, y, f"{row.part}: {text}", x_end=left)
        left = start
    sums = part.groupby("bar")["share"].sum().to_dict()
    for y, name in enumerate([*names, "ideal"]):
        text = share(sums[name]) if name in sums else "-"
        axes.text(1.05, y, text, transform=axes.get_yaxis_transform(), verticalalignment="center")
    axes.set_yticks(range(len(names) + 1), [*names, "efficiency"])
    axes.set_ylim(len(names) + 0.6, -0.6)
    axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=0)
