"""Ratios between two cells that ran in the same blocks."""

from __future__ import annotations

import re

import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.results import Results
from harness.plan.comparison import SETTING_AXES
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.common import COLOURS, MARKERS, Drawing, facets_of, panels
from harness.report.labels import cell_label
from harness.report.row import Row, is_apart, is_missing, number, rows_of
from harness.report.tables.ratios import main_axes, pair_label

TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100)
FINE = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4)
"""Ticks of an axis that spans less than a factor of two."""
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
    facets = facets_of(rows)
    ends = rows[["ratio", "low", "high"]].astype(float)
    low, high = min(0.9, 0.95 * float(ends.min().min())), max(1.1, 1.05 * float(ends.max().max()))
    ticks = [tick for tick in (FINE if high < 2 * low else TICKS) if low <= tick <= high]

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for floor in _floors(results.noise, part):
            axes.axvspan(*floor, color="0.85", zorder=0)
        for y, row in enumerate(rows_of(part)):
            strategy, ratio = str(row["strategy"]), number(row["ratio"])
            colour = COLOURS[strategy]
            if not is_missing(row["low"]):
                axes.plot([number(row["low"]), number(row["high"])], [y, y], color=colour, linewidth=1.4, zorder=2)
            face = "white" if is_apart(row) else colour
            axes.plot(ratio, y, marker=MARKERS[strategy], color=colour, markerfacecolor=face, zorder=3)
        axes.set_yticks(range(len(part)), part["label"].tolist())
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("ratio of throughputs")

    tallest = max(len(part) for _, part in facets)
    figure = panels(facets, draw, legend=[], height=max(1.5, 1.0 + 0.32 * tallest))
    caption = (
        f"Geometric mean over blocks, paired by block, with 95 % intervals{captions.no_interval(rows)}; "
        f"{captions.count(rows)}. Above 1 the first of the two is faster.{captions.noise(results.noise)}"
        f"{captions.left_out(int(left_out.sum()))}{captions.unverified(rows)}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _floors(noise: pd.DataFrame, part: pd.DataFrame) -> list[tuple[float, float]]:
    """Return the noise floors of the bases of these rows' settings."""
    settings = {_setting(row) for row in rows_of(part)}
    known = rows_of(noise[noise["low"].notna()])
    return [(number(row["low"]), number(row["high"])) for row in known if _setting(row) in settings]


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
    return f"{short}{'*' * is_apart(row)}"
