"""Throughput of cells over all runs below a folder: a figure and a text table, with the changes of environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

from harness.analysis.common import matches, order
from harness.analysis.history import UNREAD, load_history
from harness.config.values import PlainValue
from harness.errors import ComparisonError
from harness.plan.labels import Labels
from harness.report.compare import write_output
from harness.report.figures.drawing import COLOURS, FILE_DPI, MARKERS, image_of, panels, style
from harness.report.figures.scales import Limits, common_limits, draw_interval, linear_values
from harness.report.row import Row, is_true, rate_unit, rows_of, texts
from harness.report.tables.ratios import ratio
from harness.report.tables.text import TextTable, first_of, flush_right, make_table, speed, start_text, with_ends, words

MOST_PANELS = 12
FORMATS = (".png", ".svg", ".pdf")
CODE = ("git commit ", "harness ", "workload's code ")
"""Beginnings of the changes that are of code, not of environment."""


Change = tuple[float, float, str]
"""A change of environment: the start of the first run that has it, a time between it and the run before, its text."""


def write_history(
    folder: Path, wanted: str | Mapping[str, PlainValue] | None, path: Path
) -> tuple[list[tuple[str, TextTable]], list[str]]:
    """Draw the throughput of cells over the runs below a folder to ``path``; raises HarnessError.

    ``wanted``: the beginning of a cell's id, or values of axes; None for every cell. Return the table of each cell with
    its label, and sentences: what the figure shows, and which runs were left out.
    """
    if path.suffix not in FORMATS:
        raise ComparisonError(f"--output: got {str(path)!r}; allowed: a file that ends in {', '.join(FORMATS)}")
    history = load_history(folder)
    if isinstance(wanted, str):
        chosen = history[history["cell_id"].str.startswith(wanted)]
    else:
        chosen = history[np.array([matches(row, wanted or {}) for row in rows_of(history)], dtype=np.bool_)]
    if chosen.empty:
        labels = Labels(rows_of(history))
        known = [f"{row.cell_id}: {labels.of(row)}" for row in rows_of(history.drop_duplicates("cell_id"))]
        raise ComparisonError(
            f"{folder}: no cell to draw; choose some with --cell ID or --cell 'strategy=ddp,devices=2'. "
            f"Cells here: {first_of(known, MOST_PANELS)}"
        )
    labels = Labels(rows_of(chosen))
    groups = [(rows_of(group[:1])[0], group) for _, group in chosen.groupby("cell_id", sort=False)]
    cells = [(labels.of(first), group) for first, group in sorted(groups, key=lambda one: order(one[0]))]
    changes = environment_changes(chosen)
    speeds = [group["throughput_per_s"] for _, group in cells]
    by_change = sorted(range(len(cells)), key=lambda place: speeds[place].max() / speeds[place].min(), reverse=True)
    drawn = [cells[place] for place in sorted(by_change[:MOST_PANELS])]
    with style():
        known_ends = [group[["throughput_per_s", "low", "high"]].astype(float) for _, group in drawn]
        limits = common_limits([(0.95 * float(x.min().min()), 1.05 * float(x.max().max())) for x in known_ends])
        unit = rate_unit(chosen)
        figure = panels(drawn, lambda axes, group, ends: _draw(axes, group, ends, changes, unit), limits, legend=[])
    write_output(path, image_of(figure, path.suffix[1:], dpi=FILE_DPI))
    named = [f"{number}: {start_text(start)}: {text}" for number, (start, _, text) in enumerate(changes, start=1)]
    dashed = f"Dashed: the environment changed ({'. '.join(named)})." if named else "The environment never changed."
    caption = (
        f"Bars: 95 % intervals over the blocks of a run, without the noise between runs. Hollow: unfinished. {dashed}"
    )
    if len(drawn) < len(cells):
        which = f"{MOST_PANELS} of {len(cells)} cells whose throughput changed most over the runs (largest / smallest)"
        caption = f"The figure has the {which}; choose others with --cell. {caption}"
    left_out = [f"Left out: {reason}" for reason in history.attrs[UNREAD].values()]
    return [(label, _table(group)) for label, group in cells], [caption, *left_out]


def environment_changes(history: pd.DataFrame) -> list[Change]:
    """Return the changes of versions, hardware or settings, by start of the first run that has each."""
    found: dict[float, tuple[float, dict[str, None]]] = {}
    last: dict[object, Row] = {}
    for row in rows_of(history[history["started_at"].notna()]):
        before = last.get(row.cell_id)
        last[row.cell_id] = row
        if before is not None and before.environment != row.environment:
            named = [change for change in texts(row.changes) if not change.startswith(CODE)]
            between = (before.started_at + row.started_at) / 2
            found.setdefault(row.started_at, (between, {}))[1].update(dict.fromkeys(named or ["not recorded"]))
    return [(start, between, "; ".join(named)) for start, (between, named) in sorted(found.items())]


def _draw(axes: Axes, group: pd.DataFrame, limits: Limits, changes: Sequence[Change], unit: str) -> None:
    rows = rows_of(group[group["started_at"].notna()])
    times, speeds = [_day(row.started_at) for row in rows], [row.throughput_per_s for row in rows]
    strategy = str(group["strategy"].iloc[0])
    colour, marker = COLOURS[strategy], MARKERS[strategy]
    axes.plot(times, speeds, color=colour, linewidth=1, marker=marker, markersize=5)
    for time, row in zip(times, rows, strict=True):
        draw_interval(axes, "y", time, (row.low, row.high), limits, colour)
        if not is_true(row.finished):
            point = (time, row.throughput_per_s)
            axes.plot(*point, marker=marker, markersize=5, color="white", markeredgecolor="0.2", zorder=4)
    for name, (_, between, _) in enumerate(changes, start=1):
        day = _day(between)
        axes.axvline(day, color="0.35", linestyle="--", linewidth=1, zorder=1)
        coordinates = ("data", "axes fraction")
        axes.annotate(str(name), (day, 1), (-4, -4), coordinates, "offset points", ha="right", va="top")
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.margins(x=0.08)
    linear_values(axes, "y", limits)
    axes.set_ylabel(f"throughput ({unit})")
    axes.set_xlabel("start of the run")


def _day(seconds: float) -> float:
    """Return a Unix time as matplotlib's days, in the local time zone."""
    local = datetime.fromtimestamp(seconds)
    return float(date2num(local))  # type: ignore[no-untyped-call]


def _table(group: pd.DataFrame) -> TextTable:
    """Return one line a run: its start, throughput, the ratio to the run before, and the changes since then."""

    def changed(row: Row) -> str:
        """Return the changes; changes of code by name alone, since hashes say nothing to a reader."""
        return "; ".join(
            next((name.strip() for name in CODE if one.startswith(name)), one) for one in texts(row.changes)
        )

    columns = (
        ("started", lambda row: start_text(row.started_at), words),
        (rate_unit(group), lambda row: with_ends(speed, row.throughput_per_s, row.low, row.high), flush_right),
        ("/ before", "to_before", ratio),
        ("changed since", changed, words),
    )
    speeds = group["throughput_per_s"]
    return make_table(columns, rows_of(group.assign(to_before=speeds / speeds.shift())))
