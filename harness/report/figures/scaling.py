"""Throughput, efficiency and paired ratios against devices."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import is_no_claim
from harness.analysis.results import Results
from harness.plan.comparison import SETTING_AXES
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.axes import (
    Limits,
    common_limits,
    device_axis,
    draw_interval,
    linear_values,
    log_limits,
    log_values,
)
from harness.report.figures.common import (
    COLOURS,
    MARKERS,
    Drawing,
    draw_lines,
    draw_point,
    facets_of,
    hatch_point,
    mark,
    merge_single_rows,
    panels,
    strategy_legend,
    with_several_points,
)
from harness.report.labels import Row, cell_label, is_not_equivalent, number, rate_unit, rows_of
from harness.report.tables.ratios import main_axes, pair_label, ratio
from harness.report.tables.text import estimate, percent, speed

JOINED = (*TAGS, "nodes", "device_ids")
"""Points that agree in these columns are joined over devices."""


def throughput_by_devices(results: Results) -> Drawing:
    """Draw throughput against devices, both logarithmic, with the ideal line from the stated base."""
    title = "Throughput against devices"
    rows = results.scaling
    if rows.empty:
        return Drawing(title, "Left out: no cell was measured in the same block as its base.", None)
    every = facets_of(rows)
    facets = with_several_points(every)
    if not facets:
        return Drawing(title, "Left out: each setting has a single point, which the table has.", None)
    limits = common_limits([_throughput_limits(part) for _, part in facets], log=True)
    devices = pd.concat([part["devices"] for _, part in facets])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        device_axis(axes, devices)
        log_values(axes, "y", ends)
        for base, ideal in _ideals(part):
            axes.plot(base, ideal, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for row in rows_of(part):
            value = number(row["throughput_per_s"])
            draw_point(axes, row, value, (row["throughput_low"], row["throughput_high"]), ends)
            text = estimate(speed, row, "throughput_per_s", "throughput_")
            mark(axes, number(row["devices"]), value, f"{cell_label(row)}: {text} {rate_unit(rows)}")
        draw_lines(axes, part, "devices", "throughput_per_s", JOINED, marked=False)
        axes.set_ylabel(f"throughput ({rate_unit(rows)})")

    figure = panels(facets, draw, limits, legend=strategy_legend(rows, ideal=True))
    caption = (
        f"Geometric mean over {captions.count(rows)}; bars are 95 % t intervals{captions.no_interval(rows)}, an "
        f"arrow at ends beyond the axis. Dashed: the base times devices. {captions.bases(rows)}"
        f"{captions.unsteady(rows)}"
        f"{captions.excluded(rows)}{captions.set_apart(rows)}{captions.in_table(every, facets)}"
        f"{captions.scales(limits)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _ideals(part: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the devices and throughputs of the ideal line of each base."""
    lines = []
    for _, group in part.groupby("base_id"):
        devices, speed = float(group["base_devices"].iloc[0]), float(group["base_throughput_per_s"].iloc[0])
        ends = np.array([devices, max(float(group["devices"].max()), devices)])
        lines.append((ends, speed * ends / devices))
    return lines


def _throughput_limits(part: pd.DataFrame) -> Limits:
    values = [*part["throughput_per_s"].astype(float), *(speed for _, ideal in _ideals(part) for speed in ideal)]
    return log_limits(values, [*part["throughput_low"], *part["throughput_high"]])


def efficiency_by_devices(results: Results) -> Drawing:
    """Draw scaling efficiency against devices, with its interval and the ideal at 100 %."""
    title = "Scaling efficiency against devices"
    rows = results.scaling[results.scaling["devices"] != results.scaling["base_devices"]]
    left_out = rows["efficiency"].isna()
    rows = rows[~left_out]
    if rows.empty:
        return Drawing(title, "Left out: nothing was measured on another device count than its base.", None)
    every = facets_of(rows)
    facets = with_several_points(every)
    if not facets:
        return Drawing(title, "Left out: each setting has a single point, which the table has.", None)
    limits = (0.0, max(1.1, float(rows["efficiency"].max()) * 1.1))
    devices = pd.concat([part["devices"] for _, part in facets])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        device_axis(axes, devices)
        linear_values(axes, "y", ends, percent=True)
        axes.axhline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for low, high in noise_of(results.noise, part):
            axes.axhspan(low, high, color="0.85", zorder=0)
        for row in rows_of(part):
            value = number(row["efficiency"])
            draw_point(axes, row, value, (row["efficiency_low"], row["efficiency_high"]), ends)
            text = estimate(percent, row, "efficiency", "efficiency_")
            mark(axes, number(row["devices"]), value, f"{cell_label(row)}: {text}")
        draw_lines(axes, part, "devices", "efficiency", JOINED, marked=False)
        axes.set_ylabel("scaling efficiency")

    figure = panels(facets, draw, [limits] * len(facets), legend=strategy_legend(rows, ideal=True))
    caption = (
        f"Speedup over devices, {captions.scaling(rows)}; bars are 95 % intervals, paired by block, "
        f"{captions.count(rows)}{captions.no_interval(rows)}, an arrow at ends beyond the axis. "
        "Cells on as many devices "
        f"as their base are in the table. {captions.bases(rows)}{captions.unsteady(rows)}"
        f"{captions.noise(results.noise)}{captions.left_out(int(left_out.sum()))}{captions.excluded(rows)}"
        f"{captions.set_apart(rows)}{captions.in_table(every, facets)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def noise_of(noise: pd.DataFrame, rows: pd.DataFrame) -> list[tuple[float, float]]:
    """Return the noise floors of the bases of these rows."""
    mine = noise[noise["cell_id"].isin(rows["base_id"]) & noise["low"].notna()]
    return [(number(row["low"]), number(row["high"])) for row in rows_of(mine)]


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
