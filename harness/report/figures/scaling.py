"""Throughput and efficiency against devices, paired ratios, throughput and memory against the batch size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.analysis.common import is_no_claim
from harness.analysis.ratios import with_twins
from harness.analysis.results import Results
from harness.config.values import GIB
from harness.plan.labels import TAGS, setting_of
from harness.report.figures import captions
from harness.report.figures.drawing import (
    COLOURS,
    Chart,
    Drawing,
    Facet,
    add_legend,
    add_title,
    axis_label,
    draw_lines,
    draw_point,
    facets_of,
    hatch_point,
    hide_repeated_labels,
    make_grid,
    mark,
    merge_single_rows,
    name_line,
    not_equivalent_cells,
    panels,
    strategy_legend,
    with_several_points,
)
from harness.report.figures.scales import (
    Limits,
    common_limits,
    device_axis,
    draw_interval,
    linear_values,
    log2_axis,
    log_limits,
    log_values,
)
from harness.report.row import Row, cell_label, is_missing, number, rate_unit, rows_of
from harness.report.tables.ratios import main_axes, pair_label, ratio
from harness.report.tables.text import estimate, percent, speed, with_ends

JOINED = (*TAGS, "nodes", "device_ids")
"""Points that agree in these columns are joined over devices."""
LONGEST_LABEL = 60
"""The most characters of a label; a longer one would leave no place for the axes."""
SINGLE = "Left out: each setting has a single point, which the table has."
BATCH = "per_device_batch_size"
FEW_SIZES = 2
"""The most numbers of devices that make no curve."""
SPEED, MEMORY = "per_device_per_s", "peak_gib"
LABELS = {SPEED: "throughput per device", MEMORY: "peak memory per rank"}
MOST_COLUMNS = 3
"""The most settings side by side, so that the type is as large as in other figures."""


def throughput_by_devices(results: Results) -> Drawing:
    """Draw throughput against devices, both logarithmic, with its blocks and the ideal line from the stated base.

    One or two numbers of devices make no curve: each cell then has a line of its own, on a linear axis. The first
    figure is a row of panels: settings that the verdict names come first.
    """
    title, rows = "Throughput against devices", results.scaling
    if rows.empty:
        return Drawing(title, "Left out: no cell was measured in the same block as its base.", None)
    every, is_curve = facets_of(rows), rows["devices"].nunique() > FEW_SIZES
    facets = with_several_points(every) if is_curve else every
    if not facets or len(rows) == 1:
        return Drawing(title, SINGLE, None)
    by_cell = with_twins(results.trials).groupby("cell_id")["throughput_per_s"]  # of a base the mean of both trials
    dots = {str(cell): speeds.tolist() for cell, speeds in by_cell}
    named = {*results.verdict["cell_id"].dropna()}
    facets.sort(key=lambda facet: named.isdisjoint(facet[1]["cell_id"]))
    draw = _throughput_curves if is_curve else _throughput_by_cell
    parts = (facets[:MOST_COLUMNS], facets[MOST_COLUMNS:])  # one row of panels leads the page
    figures, every_limits = zip(*(draw(part, rows, dots) for part in parts if part), strict=True)
    limits = [ends for part in every_limits for ends in part]
    caption = (
        f"Geometric mean over {captions.count(rows)}, which are dots; bars are 95 % t intervals"
        f"{captions.no_interval(rows)}, an arrow at ends beyond the axis. Dashed: the base times devices"
        f"{'' if is_curve else '; percentages: scaling efficiency'}. {captions.bases(rows)}{captions.unsteady(rows)}"
        f"{captions.excluded(rows)}{captions.set_apart(rows)}{captions.in_table(every, facets)}"
        f"{captions.scales(limits)}{captions.cut(facets)}"
    )
    return Drawing(title if is_curve else "Throughput of each cell", caption, figures[0], figures[1:])


Dots = Mapping[str, Sequence[float]]
"""The values of each block by cell id."""


def _throughput_text(row: Row, unit: str) -> str:
    return f"{estimate(speed, row, 'throughput_per_s', 'throughput_')} {unit}"


def _throughput_curves(facets: Sequence[Facet], rows: pd.DataFrame, dots: Dots) -> tuple[Chart, list[Limits]]:
    """Draw throughput against devices in each facet; return the figure, and the limits of its panels."""
    limits, unit = common_limits([_throughput_limits(part) for _, part in facets], log=True), rate_unit(rows)

    def axes_and_ideal(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        log_values(axes, "y", ends)
        for base, ideal in _ideals(part):
            axes.plot(base, ideal, color="0.45", linestyle="--", linewidth=1, zorder=1)
        axes.set_ylabel(f"throughput ({unit})")

    text = partial(_throughput_text, unit=unit)
    columns = "throughput_per_s", "throughput_"
    return _against_devices(facets, limits, axes_and_ideal, *columns, text, rows, dots), limits


def _against_devices(
    facets: Sequence[Facet],
    limits: Sequence[Limits],
    draw_axes: Callable[[Axes, pd.DataFrame, Limits], None],
    name: str,
    prefix: str,
    text: Callable[[Row], str],
    rows: pd.DataFrame,
    dots: Dots = MappingProxyType({}),
) -> Chart:
    """Draw the column ``name`` against devices; ``prefix``: that of its interval; ``text``: a value on hover."""
    devices = pd.concat([part["devices"] for _, part in facets])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        device_axis(axes, devices)
        draw_axes(axes, part, ends)
        for row in rows_of(part):
            interval = row[f"{prefix}low"], row[f"{prefix}high"]
            draw_interval(axes, "y", row.devices, interval, ends, COLOURS[row.strategy])
            blocks = dots.get(row.cell_id, ())
            _draw_blocks(axes, [row.devices] * len(blocks), blocks, row)
            draw_point(axes, row.devices, row[name], row, markersize=6)
            mark(axes, row.devices, row[name], f"{cell_label(row)}: {text(row)}")
        draw_lines(axes, part, "devices", name, JOINED, marked=False)

    return panels(facets, draw, limits, legend=strategy_legend(rows, ideal=True))


def _draw_blocks(axes: Axes, x: Sequence[float], y: Sequence[float], row: Row) -> None:
    axes.plot(x, y, color=COLOURS[row.strategy], linestyle="", marker=".", markersize=5, alpha=0.45, zorder=2)


def _throughput_by_cell(facets: Sequence[Facet], rows: pd.DataFrame, dots: Dots) -> tuple[Chart, list[Limits]]:
    """Draw the throughput of each cell on a line of its own, with its efficiency, its blocks and the ideal."""
    named = [(name, part.assign(label=[_with_efficiency(row) for row in rows_of(part)])) for name, part in facets]
    limits, unit = common_limits([_linear_limits(part, dots) for _, part in facets]), rate_unit(rows)

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "x", ends, steps=4)
        for y, row in enumerate(rows_of(part)):
            blocks, interval = dots.get(row.cell_id, ()), (row.throughput_low, row.throughput_high)
            _draw_blocks(axes, blocks, [y + 0.22] * len(blocks), row)
            draw_interval(axes, "x", y, interval, ends, COLOURS[row.strategy])
            draw_point(axes, row.throughput_per_s, y, row)
            mark(axes, row.throughput_per_s, y, f"{cell_label(row)}: {_throughput_text(row, unit)}")
            if row.devices != row.base_devices:
                axes.plot([_ideal(row)] * 2, [y - 0.35, y + 0.35], color="0.45", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(part)), part["label"].tolist())
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_xlabel(f"throughput ({unit})")

    return panels(named, draw, limits, legend=strategy_legend(rows, ideal=True), bars=True), limits


def _with_efficiency(row: Row) -> str:
    scales = row.devices != row.base_devices and not is_missing(row.efficiency)
    return f"{axis_label(row)}{f'  {percent(row.efficiency)}' if scales else ''}"


def _ideal(row: Row) -> float:
    return number(row.base_throughput_per_s) * number(row.devices) / number(row.base_devices)


def _linear_limits(part: pd.DataFrame, dots: Dots) -> Limits:
    """Return limits from 0 to the largest value, block or ideal, and to ends of intervals up to a factor of 2."""
    largest = max(max([number(row.throughput_per_s), _ideal(row), *dots.get(row.cell_id, ())]) for row in rows_of(part))
    reach = max((number(end) for end in part["throughput_high"] if not is_missing(end)), default=0.0)
    return 0.0, 1.05 * max(largest, min(reach, 2 * largest))


def _ideals(part: pd.DataFrame) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the devices and throughputs of the ideal line of each base, from the base to the most devices."""
    most = rows_of(part.sort_values("devices").drop_duplicates("base_id", keep="last"))
    return [
        ((row.base_devices, max(row.devices, row.base_devices)), (number(row.base_throughput_per_s), _ideal(row)))
        for row in most
    ]


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
    if results.scaling["devices"].nunique() <= FEW_SIZES:
        return Drawing(title, "Left out: on one or two numbers of devices the figure of throughput has it.", None)
    every = facets_of(rows)
    facets = with_several_points(every)
    if not facets:
        return Drawing(title, SINGLE, None)
    limits = [(0.0, max(1.1, float(rows["efficiency"].max()) * 1.1))] * len(facets)

    def axes_and_ideal(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        linear_values(axes, "y", ends, percent=True)
        axes.axhline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        floors = results.noise[results.noise["cell_id"].isin(part["base_id"]) & results.noise["low"].notna()]
        for row in rows_of(floors):
            axes.axhspan(row.low, row.high, color="0.85", zorder=0)
        axes.set_ylabel("scaling efficiency")

    kinds = {"weak": "weak scaling (per-device batch fixed)", "strong": "strong scaling (global batch fixed)"}
    held = " and ".join(kinds[kind] for kind in sorted(rows["scaling"].unique()))
    text = partial(estimate, percent, name="efficiency", prefix="efficiency_")
    figure = _against_devices(facets, limits, axes_and_ideal, "efficiency", "efficiency_", text, rows)
    caption = (
        f"Speedup over devices, {held}; bars are 95 % intervals, paired by block, "
        f"{captions.count(rows)}{captions.no_interval(rows)}, an arrow at ends beyond the axis. "
        "Cells on as many devices "
        f"as their base are in the table. {captions.bases(rows)}{captions.unsteady(rows)}"
        f"{captions.noise(results.noise)}{captions.left_out(int(left_out.sum()))}{captions.excluded(rows)}"
        f"{captions.set_apart(rows)}{captions.in_table(every, facets)}{captions.cut(facets)}"
    )
    return Drawing(title, caption, figure)


def paired_ratios(results: Results) -> Drawing:
    """Draw the ratios of throughputs, with intervals, along the axis the file is about, and between launchers."""
    title = "Paired throughput ratios"
    rows = _labelled_rows(results)
    left_out = rows["ratio"].isna()
    rows = rows[~left_out]
    if rows.empty:
        return Drawing(title, "Left out: no two cells that differ in one axis were measured in the same block.", None)
    if len(rows) == 1:
        return Drawing(title, "Left out: there is one ratio, in the table.", None)
    every = facets_of(rows)
    facets = merge_single_rows(every)
    limits = log_limits([0.9, 1.1, *rows["ratio"].astype(float)], [*rows["low"], *rows["high"]])
    floors = rows_of(results.noise[results.noise["low"].notna()])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        log_values(axes, "x", ends)
        axes.axvline(1.0, color="0.45", linestyle="--", linewidth=1, zorder=1)
        for y, row in enumerate(rows_of(part)):
            for base in floors:
                if setting_of(base) == setting_of(row):
                    width = base.high - base.low
                    axes.barh(y, width, left=base.low, height=1.0, color="0.85", linewidth=0, zorder=0)
            draw_interval(axes, "x", y, (row.low, row.high), ends, COLOURS[row.strategy])
            draw_point(axes, row.ratio, y, row)
            mark(axes, row.ratio, y, f"{row.label}: {estimate(ratio, row, 'ratio')}")
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


def _labelled_rows(results: Results) -> pd.DataFrame:
    """Return the ratios with their labels, which have a star in place of the words that set a rehearsal apart."""

    def starred(row: Row, label: str) -> str:
        plain = re.sub(rf" \((({'|'.join(TAGS)})(, )?)+\)", "", label)
        short = plain if len(plain) <= LONGEST_LABEL else f"{plain[: LONGEST_LABEL - 3]}..."
        return f"{short}{'*' * is_no_claim(row)}"

    versus, parity = main_axes(results.versus), results.parity
    versus = versus.assign(label=[starred(row, pair_label(row)) for row in rows_of(versus)])
    parity = parity.assign(label=[starred(row, f"Ray / torchrun: {cell_label(row)}") for row in rows_of(parity)])
    return pd.concat([versus, parity], ignore_index=True)


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
        limits = common_limits([_batch_limits(part, value) for _, part in facets])
        for axes, (_, part), ends in zip(line, facets, limits, strict=True):
            lost = failed[failed["model"].fillna("").isin(part["model"].fillna(""))]
            _draw_batches(axes, part, lost, value, ends)
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
    crosses = ", ".join(f"{count} {outcome}" for outcome, count in failed.groupby("outcome").size().items())
    memory += f" Crosses: {crosses} (trials)." if crosses else ""
    caption = (
        f"Each point is one cell, {captions.count(rows)}; bars are 95 % intervals of its throughput"
        f"{captions.no_interval(rows)}; lines join cells of one strategy and device count (beside the line)."
        f"{memory}{captions.hatch_note(not_equivalent, rows)}{captions.set_apart(rows)}"
        f"{captions.in_table(every, facets, '')}"
    )
    return Drawing(title, caption, figure)


def _batch_limits(part: pd.DataFrame, value: str) -> Limits:
    highest = [part[value].max(), *([part["high"].max()] if value == SPEED else [])]
    known = [float(one) for one in highest if not pd.isna(one)]
    most = min(max(known), 2 * known[0]) if known else 1.0
    return 0.0, 1.1 * most


def _draw_batches(axes: Axes, part: pd.DataFrame, lost: pd.DataFrame, value: str, limits: Limits) -> None:
    log2_axis(axes, pd.concat([part[BATCH], lost[BATCH]]))
    linear_values(axes, "y", limits)
    draw_lines(axes, part, BATCH, value, ("devices", *JOINED))
    for (strategy, devices, *_), group in part.groupby(["strategy", "devices", *JOINED], dropna=False):
        last = rows_of(group.sort_values(BATCH))[-1]
        if not is_missing(last[value]):
            name_line(axes, str(devices), (number(last[BATCH]), last[value]), str(strategy))
    for row in rows_of(part[part[value].notna()]):
        text = f"{row[value]:.3g} GiB"
        if value == SPEED:
            draw_interval(axes, "y", number(row[BATCH]), (row.low, row.high), limits, COLOURS[row.strategy])
            n = "" if is_missing(row.blocks) else f", n = {row.blocks}"
            text = f"{with_ends(speed, row[value], row.low, row.high)} of one device{n}"
        mark(axes, number(row[BATCH]), row[value], f"{cell_label(row)}: {text}")
    for batch in sorted(lost[BATCH].dropna().unique()):
        axes.plot(batch, 0, marker="x", color="crimson", markersize=8, clip_on=False, zorder=5)
