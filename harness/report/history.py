"""Throughput of cells over all runs below a folder: a figure and a text table, with the changes of environment."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from harness.record.frames import records
from harness.report.compare import write_output
from harness.report.figures.axes import Limits, common_limits, draw_interval, linear_values
from harness.report.figures.common import COLOURS, MARKERS, panels, style
from harness.report.labels import Row, is_missing, is_true, number, rate_unit, rows_of
from harness.report.tables.compare import start_text
from harness.report.tables.ratios import ratio
from harness.report.tables.text import Column, TextTable, flush_right, make_table, speed, with_ends, words

MOST_PANELS = 12
FORMATS = (".png", ".svg", ".pdf")
DPI = 144


@dataclass(frozen=True)
class HistoryReport:
    """The history of some cells: its tables, each with the cell's label, the figure's file, and what it shows."""

    tables: list[tuple[str, TextTable]]
    caption: str
    path: Path
    unread: Mapping[str, str]


def write_history(folder: Path, wanted: str | Mapping[str, PlainValue] | None, output: Path | None) -> HistoryReport:
    """Draw the cells' throughput over the runs below a folder; raises HarnessError.

    ``wanted``: the beginning of a cell's id, or values of axes; None for every cell. ``output``: the figure's file, by
    default history.png in the folder.
    """
    path = output or folder / "history.png"
    if path.suffix not in FORMATS:
        raise ComparisonError(f"--output: got {str(path)!r}; allowed: a file that ends in {', '.join(FORMATS)}")
    history = load_history(folder)
    chosen = history[np.array([_is_chosen(row, wanted) for row in records(history)], dtype=bool)]
    labels = Labels(rows_of(chosen))
    groups = [(rows_of(group[:1])[0], group) for _, group in chosen.groupby("cell_id", sort=False)]
    cells = [(labels.of(first), group) for first, group in sorted(groups, key=lambda one: order(one[0]))]
    if not cells:
        raise _no_cell(history, folder)
    marks = environment_changes(chosen)
    by_change = sorted(range(len(cells)), key=lambda place: _change(cells[place][1]), reverse=True)
    drawn = [cells[place] for place in sorted(by_change[:MOST_PANELS])]
    with style():
        limits = common_limits([_limits(group) for _, group in drawn])
        unit = rate_unit(chosen)
        figure = panels(drawn, lambda axes, group, ends: _draw(axes, group, ends, marks, unit), limits, legend=[])
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=DPI)
    write_output(path, content.getvalue())
    caption = _caption(marks)
    if len(drawn) < len(cells):
        which = f"{MOST_PANELS} of {len(cells)} cells whose throughput changed most over the runs (largest / smallest)"
        caption = f"The figure has the {which}; choose others with --cell. {caption}"
    return HistoryReport([(label, _table(group)) for label, group in cells], caption, path, history.attrs[UNREAD])


def _is_chosen(row: Row, wanted: str | Mapping[str, PlainValue] | None) -> bool:
    if wanted is None:
        return True
    return str(row["cell_id"]).startswith(wanted) if isinstance(wanted, str) else matches(row, wanted)


def _change(group: pd.DataFrame) -> float:
    """Return a cell's largest throughput in a run over its smallest."""
    return float(group["throughput_per_s"].max() / group["throughput_per_s"].min())


def _no_cell(history: pd.DataFrame, folder: Path) -> ComparisonError:
    labels = Labels(rows_of(history))
    known = rows_of(history.drop_duplicates("cell_id"))[:MOST_PANELS]
    some = "; ".join(f"{row['cell_id']}: {labels.of(row)}" for row in known)
    return ComparisonError(
        f"{folder}: no cell to draw; choose some with --cell ID or --cell 'strategy=ddp,devices=2'. Cells here: {some}"
        + "; ..." * (history["cell_id"].nunique() > MOST_PANELS)
    )


@dataclass(frozen=True)
class Change:
    """A change of environment: the start of the first run that has it, and a time between it and the run before."""

    start: float
    between: float
    text: str


def environment_changes(history: pd.DataFrame) -> list[Change]:
    """Return the changes of versions, hardware or settings, by start of the first run that has each."""
    found: dict[float, tuple[float, dict[str, None]]] = {}
    last: dict[object, Row] = {}
    for row in rows_of(history[history["started_at"].notna()]):
        before = last.get(row["cell_id"])
        last[row["cell_id"]] = row
        if before is not None and before["environment"] != row["environment"]:
            start = number(row["started_at"])
            texts = [str(change) for change in _changes(row) if not str(change).startswith(CODE)]
            between = (number(before["started_at"]) + start) / 2
            found.setdefault(start, (between, {}))[1].update(dict.fromkeys(texts or ["not recorded"]))
    return [Change(start, between, "; ".join(texts)) for start, (between, texts) in sorted(found.items())]


CODE = ("git commit ", "harness ", "workload's code ")
"""Beginnings of the changes that are of code, not of environment."""


def _changes(row: Row) -> Iterable[object]:
    changes = row["changes"]
    return changes if isinstance(changes, tuple) else ()


def _limits(group: pd.DataFrame) -> Limits:
    """Return the limits of the axis of throughput: the runs and their intervals."""
    known = group[["throughput_per_s", "low", "high"]].astype(float)
    low, high = float(known.min().min()), float(known.max().max())
    return 0.95 * low, 1.05 * high


def _draw(axes: Axes, group: pd.DataFrame, limits: Limits, marks: Sequence[Change], unit: str) -> None:
    rows = [row for row in rows_of(group) if not is_missing(row["started_at"])]
    times = [_day(number(row["started_at"])) for row in rows]
    speeds = [number(row["throughput_per_s"]) for row in rows]
    strategy = str(group["strategy"].iloc[0])
    axes.plot(times, speeds, color=COLOURS[strategy], linewidth=1, marker=MARKERS[strategy], markersize=5)
    for time, value, row in zip(times, speeds, rows, strict=True):
        draw_interval(axes, "y", time, (row["low"], row["high"]), limits, COLOURS[strategy])
        if not is_true(row["finished"]):
            axes.plot(
                time, value, marker=MARKERS[strategy], markersize=5, color="white", markeredgecolor="0.2", zorder=4
            )
    for name, mark in enumerate(marks, start=1):
        axes.axvline(_day(mark.between), color="0.35", linestyle="--", linewidth=1, zorder=1)
        axes.annotate(
            str(name),
            (_day(mark.between), 1),
            (-4, -4),
            ("data", "axes fraction"),
            "offset points",
            ha="right",
            va="top",
        )
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


def _caption(marks: Sequence[Change]) -> str:
    changes = [f"{name}: {start_text(mark.start)}: {mark.text}" for name, mark in enumerate(marks, start=1)]
    dashed = (
        f" Dashed: the environment changed ({'. '.join(changes)})." if changes else " The environment never changed."
    )
    return f"Bars: 95 % intervals over the blocks of a run, without the noise between runs. Hollow: unfinished.{dashed}"


def _table(group: pd.DataFrame) -> TextTable:
    """Return one line a run: its start, throughput, the ratio to the run before, and the changes since then."""
    speeds = [None, *group["throughput_per_s"].tolist()[:-1]]
    rows = [{**row, "before": before} for row, before in zip(rows_of(group), speeds, strict=True)]
    columns: tuple[Column, ...] = (
        ("started", lambda row: start_text(row["started_at"]), words),
        (rate_unit(group), lambda row: with_ends(speed, row["throughput_per_s"], row["low"], row["high"]), flush_right),
        ("/ before", _to_before, flush_right),
        ("changed since", lambda row: "; ".join(map(_short, _changes(row))), words),
    )
    return make_table(columns, rows)


def _to_before(row: Row) -> str:
    return "-" if is_missing(row["before"]) else ratio(number(row["throughput_per_s"]) / number(row["before"]))


def _short(change: object) -> str:
    """Return a change of code by its name alone, since hashes say nothing to a reader."""
    return next((name.strip() for name in CODE if str(change).startswith(name)), str(change))
