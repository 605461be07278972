"""Throughput of a device and memory against the batch size; memory of each GPU."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.analysis.results import Results
from harness.config.values import GIB
from harness.plan.labels import TAGS
from harness.report.figures import captions
from harness.report.figures.drawing import (
    COLOURS,
    Drawing,
    add_legend,
    add_title,
    draw_lines,
    facets_of,
    hatch_point,
    hide_repeated_labels,
    make_grid,
    mark,
    not_equivalent_cells,
    panels,
    strategy_legend,
    with_several_points,
)
from harness.report.figures.scales import Limits, common_limits, draw_interval, linear_values, log2_axis
from harness.report.row import cell_label, is_missing, number, rate_unit, rows_of
from harness.report.tables.text import speed, with_ends

BATCH = "per_device_batch_size"
SPEED, MEMORY = "per_device_per_s", "peak_gib"
LABELS = {SPEED: "throughput per device", MEMORY: "peak memory per rank"}
LINES = ("devices", "device_ids", "nodes", *TAGS)
MOST_COLUMNS = 3
"""The most settings side by side, so that the type is as large as in other figures."""


def batch_sizes(results: Results) -> Drawing:
    """Draw per-device throughput, and on GPUs peak memory, against the per-device batch; crosses: no result."""
    cells = results.cells
    on_gpus = cells["peak_memory_bytes"].where(cells["device"] == "cuda")  # on a CPU it is that of a process
    of_one_device = {end: cells[end] / cells["devices"] for end in ("low", "high")}
    rows = cells.assign(peak_gib=on_gpus / GIB, **of_one_device)
    quantities = [SPEED, *([MEMORY] if rows[MEMORY].notna().any() else [])]
    title = f"Per-device throughput{' and peak memory' if MEMORY in quantities else ''} against batch size"
    every = facets_of(rows, batch=False)
    facets = with_several_points(every, BATCH)[:MOST_COLUMNS]
    if not facets:
        return Drawing(title, "Left out: only one batch size was measured of each setting.", None)
    not_equivalent = not_equivalent_cells(results)
    trials = results.trials[results.trials["kind"] == "throughput"]
    bad = trials["outcome"].isin(["oom", "error", "timeout", "lost", "diverged"])
    failed = trials[bad | trials["skip_code"].isin(["out_of_memory", "doctor_memory", "too_few_samples"])]
    figure, grid = make_grid(len(quantities), len(facets))
    for line, value in zip(grid, quantities, strict=True):
        limits = common_limits([_limits(part, value) for _, part in facets])
        for axes, (_, part), ends in zip(line, facets, limits, strict=True):
            lost = failed[failed["model"].fillna("").isin(part["model"].fillna(""))]
            _panel(axes, part, lost, value, ends)
            for row in rows_of(part[part["cell_id"].isin(not_equivalent) & part[value].notna()]):
                hatch_point(axes, number(row[BATCH]), row[value])
        hide_repeated_labels(line)
        line[0].set_ylabel(f"{LABELS[value]}\n({'GiB' if value == MEMORY else rate_unit(rows)})")
    for axes, (facet, _) in zip(grid[0], facets, strict=True):
        add_title(axes, facet)
    for axes in grid[-1]:
        axes.set_xlabel("per-device batch size (samples)")
    marks = [Line2D([], [], marker="x", linestyle="", color="crimson", label="not measured")] if len(failed) else []
    add_legend(figure, [*strategy_legend(rows), *marks])
    memory = " Memory: allocated on the GPU." if MEMORY in quantities else ""
    caption = (
        f"Each point is one cell, {captions.count(rows)}; bars are 95 % intervals of its throughput"
        f"{captions.no_interval(rows)}; lines join cells of one strategy and device count (beside the line)."
        f"{memory}{captions.failures(failed)}{captions.hatch_note(not_equivalent, rows)}{captions.set_apart(rows)}"
        f"{captions.in_table(every, facets, '')}"
    )
    return Drawing(title, caption, figure)


def _limits(part: pd.DataFrame, value: str) -> Limits:
    highest = [part[value].max(), *([part["high"].max()] if value == SPEED else [])]
    known = [float(one) for one in highest if not pd.isna(one)]
    most = min(max(known), 2 * known[0]) if known else 1.0
    return 0.0, 1.1 * most


def _panel(axes: Axes, part: pd.DataFrame, lost: pd.DataFrame, value: str, limits: Limits) -> None:
    log2_axis(axes, pd.concat([part[BATCH], lost[BATCH]]))
    linear_values(axes, "y", limits)
    draw_lines(axes, part, BATCH, value, LINES)
    for (strategy, devices, *_), group in part.groupby(["strategy", *LINES], dropna=False):
        last = rows_of(group.sort_values(BATCH))[-1]
        if not is_missing(last[value]):
            _name_devices(axes, str(devices), (number(last[BATCH]), last[value]), str(strategy))
    for row in rows_of(part[part[value].notna()]):
        text = f"{row[value]:.3g} GiB"
        if value == SPEED:
            draw_interval(axes, "y", number(row[BATCH]), (row.low, row.high), limits, COLOURS[row.strategy])
            n = "" if is_missing(row.blocks) else f", n = {row.blocks}"
            text = f"{with_ends(speed, row[value], row.low, row.high)} of one device{n}"
        mark(axes, number(row[BATCH]), row[value], f"{cell_label(row)}: {text}")
    for batch in sorted(lost[BATCH].dropna().unique()):
        axes.plot(batch, 0, marker="x", color="crimson", markersize=8, clip_on=False, zorder=5)


def _name_devices(axes: Axes, devices: str, at: tuple[float, float], strategy: str) -> None:
    """Write the number of devices beside the last point of a line."""
    axes.annotate(devices, at, xytext=(7, -3), textcoords="offset points", color=COLOURS[strategy])


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
        mark(axes, row.gpu, row.gib, f"{cell_label(row)}, GPU {row.gpu} ({row.name}): {row.gib:.3g} GiB")
        if row.gpu == row.devices - 1:
            _name_devices(axes, str(row.devices), (row.gpu, row.gib), row.strategy)
    axes.set_xlabel("GPU of the cell")
    axes.set_ylabel("peak memory (GiB)")
