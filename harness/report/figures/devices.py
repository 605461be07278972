"""Figures of single devices and of what joins them: memory of each GPU, bus bandwidth against size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.analysis.common import grouped
from harness.analysis.results import Results
from harness.config.values import GIB
from harness.report.figures import captions
from harness.report.figures.drawing import (
    MOST_FACETS,
    Drawing,
    draw_lines,
    facets_of,
    mark,
    name_line,
    panels,
    strategy_legend,
)
from harness.report.figures.scales import Limits, common_limits, linear_values, log_limits, log_values
from harness.report.row import cell_label, rows_of
from harness.report.tables.links import operation_label, operations, placement_label
from harness.report.tables.text import size, span

STYLES: Mapping[str, tuple[Literal["-", "--", "-.", ":"], str, str]] = {
    "all_reduce": ("-", "o", "0.1"),
    "all_gather": ("--", "v", "0.35"),
    "reduce_scatter": ("-.", "P", "0.35"),
    "send_receive": (":", "x", "0.55"),
    "copy": (":", "x", "0.55"),
}
"""Line, marker and grey of an operation: colour means strategy."""
TICK_EVERY = 8
"""The factor between ticks of the axis of sizes."""


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
    figure = panels(facets, _draw_memory, [limits] * len(facets), legend=strategy_legend(rows))
    caption = (
        "Memory allocated in the steps, largest over the blocks, of each GPU of a cell, in their order; lines join the "
        "GPUs of one cell, whose number stands beside the last. Under dp, GPU 0 also holds the gathered outputs and "
        f"gradients, and the optimizer's state.{captions.set_apart(rows)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def _draw_memory(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
    linear_values(axes, "y", ends)
    draw_lines(axes, part, "gpu", "gib", ["cell_id"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for row in rows_of(part):
        mark(axes, row.gpu, row.gib, f"{cell_label(row)}, GPU {row.gpu} ({row.name}): {row.gib:.3g} GiB")
        if row.gpu == row.devices - 1:
            name_line(axes, str(row.devices), (row.gpu, row.gib), row.strategy)
    axes.set_xlabel("GPU of the cell")
    axes.set_ylabel("peak memory (GiB)")


def bus_bandwidth(results: Results) -> Drawing:
    """Draw the bus bandwidth of each collective, and of the pairs of a tier, against size; one panel a placement."""
    title = "Bus bandwidth against size"
    found = operations(results.collectives, results.links)
    if not found:
        return Drawing(title, "Left out: no links were measured (throughput.explain, links_seconds).", None)
    facets = grouped(found, lambda sizes: placement_label(rows_of(sizes[:1])[0]))
    drawn = [(label, pd.concat(parts)) for label, parts in list(facets.items())[:MOST_FACETS]]
    looks = {operation_label(row): STYLES[row.operation] for sizes in found for row in rows_of(sizes[:1])}
    limits = common_limits([_limits(part) for _, part in drawn], log=True)
    figure = panels(drawn, _draw_bandwidth, limits, legend=[])
    handles = [
        Line2D([], [], color=grey, linestyle=line, marker=marker, markersize=4, label=label)
        for label, (line, marker, grey) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)  # the width of one panel
    everything = pd.concat(found)
    largest = size(float(everything["size_bytes"].max()))
    repetitions = span("{:.0f}".format, everything["repetitions"])
    caption = (
        "Algorithm bandwidth (size over time of the slowest rank), times 2(n-1)/n for all-reduce and (n-1)/n for "
        "all-gather and reduce-scatter of n devices, as nccl-tests defines it. Bars: shortest and longest of "
        f"{repetitions} repetitions; of pairs the median over the pairs. Largest size: {largest}; the next would have "
        f"exceeded throughput.links_seconds or the memory.{captions.scales(limits)}{captions.cut(drawn)}"
    )
    return Drawing(title, caption, figure)


def _limits(part: pd.DataFrame) -> Limits:
    speeds = part["bus_bytes_per_s"].astype(float) / 1e9
    return log_limits([*speeds[speeds > 0]], [])


def _draw_bandwidth(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
    for (operation, _), sizes in part.groupby(["operation", "tier"], sort=False):
        line, marker, grey = STYLES[str(operation)]
        x, y = (sizes[name].astype(float) for name in ("size_bytes", "bus_bytes_per_s"))
        slowest, fastest = (y * sizes["time_s"].astype(float) / sizes[end].astype(float) for end in ("max_s", "min_s"))
        error = [(y - slowest).clip(lower=0) / 1e9, (fastest - y).clip(lower=0) / 1e9]
        axes.errorbar(x, y / 1e9, yerr=error, color=grey, linestyle=line, marker=marker, markersize=4, linewidth=1)
        for row, speed in zip(rows_of(sizes), y / 1e9, strict=True):
            text = f"{operation_label(row)}, {size(row.size_bytes)}: {speed:.3g} GB/s"
            mark(axes, row.size_bytes, speed, text)
    axes.set_xscale("log", base=2)
    log_values(axes, "y", ends)
    least, most = float(part["size_bytes"].min()), float(part["size_bytes"].max())
    ticks = [1024.0]
    while ticks[-1] * TICK_EVERY <= most:
        ticks.append(ticks[-1] * TICK_EVERY)
    axes.set_xticks(ticks, [size(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(least / 1.5, most * 1.5)
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (GB/s)")
