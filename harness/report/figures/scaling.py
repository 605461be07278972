"""Throughput and efficiency against devices."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.common import (
    Drawing,
    draw_lines,
    draw_point,
    facets_of,
    log2_axis,
    panels,
    strategy_legend,
)
from harness.report.labels import rate_unit
from harness.report.row import number, rows_of

JOINED = ("emulated", "oversubscribed", "nodes", "device_ids")
"""Points that agree in these columns are joined over devices."""


def throughput_by_devices(results: Results) -> Drawing:
    """Draw throughput against devices, log2 on both axes, with the ideal line from the stated base."""
    title = "Throughput against devices"
    intervals = results.cells[["cell_id", "low", "high"]].rename(columns={"low": "speed_low", "high": "speed_high"})
    rows = results.scaling.merge(intervals, on="cell_id", how="left", validate="one_to_one")
    if rows.empty:
        return Drawing(title, "Left out: no cell was measured in the same block as its base.", None)
    facets = facets_of(rows)

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        for _, group in part.groupby("base_id"):
            devices, speed = group["base_devices"].iloc[0], group["base_throughput_per_s"].iloc[0]
            ends = np.array([devices, max(group["devices"].max(), devices)], dtype=float)
            axes.plot(ends, speed * ends / devices, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for row in rows_of(part):
            draw_point(axes, row, number(row["throughput_per_s"]), row["speed_low"], row["speed_high"])
        draw_lines(axes, part, "devices", "throughput_per_s", JOINED, marked=False)
        log2_axis(axes, part["devices"])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("devices")
        axes.set_ylabel(f"throughput ({rate_unit(rows)})")

    figure = panels(facets, draw, legend=strategy_legend(rows, ideal=True))
    caption = (
        f"Geometric mean over {captions.count(rows)}; bars are 95 % t intervals{captions.no_interval(rows)}. "
        f"Dashed: the base times devices. {captions.bases(rows)}{captions.unsteady(rows)}{captions.excluded(rows)}"
        f"{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def efficiency_by_devices(results: Results) -> Drawing:
    """Draw scaling efficiency against devices, with its interval and the ideal at 1."""
    title = "Scaling efficiency against devices"
    rows = results.scaling[results.scaling["devices"] != results.scaling["base_devices"]]
    left_out = rows["efficiency"].isna()
    rows = rows[~left_out]
    if rows.empty:
        return Drawing(title, "Left out: nothing was measured on another device count than its base.", None)
    facets = facets_of(rows)
    top = max(1.1, float(rows["efficiency"].max()) * 1.1)

    def draw(axes: Axes, part: pd.DataFrame) -> None:
        axes.axhline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for low, high in noise_of(results.noise, part):
            axes.axhspan(low, high, color="0.85", zorder=0)
        for row in rows_of(part):
            draw_point(axes, row, number(row["efficiency"]), row["efficiency_low"], row["efficiency_high"])
        draw_lines(axes, part, "devices", "efficiency", JOINED, marked=False)
        log2_axis(axes, part["devices"])
        axes.set_ylim(0, top)
        axes.set_xlabel("devices")
        axes.set_ylabel("scaling efficiency")

    figure = panels(facets, draw, legend=strategy_legend(rows, ideal=True))
    caption = (
        f"Speedup over devices, {captions.scaling(rows)}; bars are 95 % intervals, paired by block, "
        f"{captions.count(rows)}{captions.no_interval(rows)}. Cells on as many devices as their base are in the table. "
        f"{captions.bases(rows)}{captions.unsteady(rows)}{captions.noise(results.noise)}{captions.left_out(int(left_out.sum()))}"
        f"{captions.unverified(rows)}{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def noise_of(noise: pd.DataFrame, rows: pd.DataFrame) -> list[tuple[float, float]]:
    """Return the noise floors of the bases of these rows."""
    mine = noise[noise["cell_id"].isin(rows["base_id"]) & noise["low"].notna()]
    return [(number(row["low"]), number(row["high"])) for row in rows_of(mine)]
