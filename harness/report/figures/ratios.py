"""Ratios between two cells that ran in the same blocks."""

from __future__ import annotations

import re

import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.plan.comparison import SETTING_AXES
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.axes import Limits, draw_interval, log_limits, log_values
from harness.report.figures.chart import mark
from harness.report.figures.common import COLOURS, MARKERS, Drawing, facets_of, hatch_point, merge_single_rows, panels
from harness.report.labels import cell_label
from harness.report.row import Row, is_not_equivalent, number, rows_of
from harness.report.tables.ratios import main_axes, pair_label, ratio
from harness.report.tables.text import estimate

LONGEST_LABEL = 60
"""The most characters of a label; a longer one would leave no place for the axes."""
NOTHING = "Left out: no two cells that differ in one axis were measured in the same block."


def paired_ratios(results: Results) -> Drawing:
    """Draw the ratios of throughputs, with intervals, along the axis the file is about, and between launchers."""
    title = "Paired throughput ratios"
    rows = _labelled_rows(results)
    left_out = rows["ratio"].isna()
    rows = rows[~left_out]
    if rows.empty:
        return Drawing(title, NOTHING, None)
    if len(rows) == 1:
        return Drawing(title, "Left out: there is one ratio, in the table.", None)
    every = facets_of(rows)
    facets = merge_single_rows(every)
    limits = log_limits([0.9, 1.1, *rows["ratio"].astype(float)], [*rows["low"], *rows["high"]])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        log_values(axes, "x", ends)
        axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for y, row in enumerate(rows_of(part)):
            for low, high in _floors(results.noise, row):
                axes.barh(y, high - low, left=low, height=1.0, color="0.85", linewidth=0, zorder=0)
            strategy, value = str(row["strategy"]), number(row["ratio"])
            colour = COLOURS[strategy]
            draw_interval(axes, "x", y, (row["low"], row["high"]), ends, colour)
            face = "white" if is_no_claim(row) else colour
            if is_not_equivalent(row):
                hatch_point(axes, value, y)
            axes.plot(value, y, marker=MARKERS[strategy], color=colour, markerfacecolor=face, zorder=4)
            mark(axes, value, y, f"{row['label']}: {estimate(ratio, row, 'ratio')}")
        axes.set_yticks(range(len(part)), part["label"].tolist())
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_xlabel("ratio of throughputs")

    figure = panels(facets, draw, [limits] * len(facets), legend=[], bars=True)
    caption = (
        f"Geometric mean over blocks, paired by block, with 95 % intervals{captions.no_interval(rows)}, an "
        f"arrow at ends beyond the axis; {captions.count(rows)}. Above 1 the first of the two is faster."
        f"{captions.noise(results.noise)}{captions.left_out(int(left_out.sum()))}{captions.excluded(rows)}"
        f"{captions.set_apart(rows)}{captions.cut(every)}"
    )
    return Drawing(title, caption, figure)


def _floors(noise: pd.DataFrame, row: Row) -> list[tuple[float, float]]:
    """Return the noise floors of the bases of a row's setting."""
    known = rows_of(noise[noise["low"].notna()])
    return [(number(base["low"]), number(base["high"])) for base in known if _setting(base) == _setting(row)]


def _setting(row: Row) -> tuple[str, ...]:
    batch = "global_batch_size" if row["scaling"] == "strong" else "per_device_batch_size"
    return tuple(str(row[axis]) for axis in (*SETTING_AXES, batch) if axis != "per_device_batch_size" or axis == batch)


def _labelled_rows(results: Results) -> pd.DataFrame:
    versus, parity = main_axes(results.versus), results.parity
    versus = versus.assign(label=[_starred(row, pair_label(row)) for row in rows_of(versus)])
    parity = parity.assign(label=[_starred(row, _launchers(row)) for row in rows_of(parity)])
    return pd.concat([versus, parity], ignore_index=True)


def _launchers(row: Row) -> str:
    return f"Ray / torchrun: {cell_label(row)}"


def _starred(row: Row, label: str) -> str:
    """Return the label with a star in place of the words that set a rehearsal apart."""
    plain = re.sub(rf" \((({'|'.join(TAGS)})(, )?)+\)", "", label)
    short = plain if len(plain) <= LONGEST_LABEL else f"{plain[: LONGEST_LABEL - 3]}..."
    return f"{short}{'*' * is_no_claim(row)}"
