"""Shared parts of figures: style, colour and marker of a strategy, panels, axes, legend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.analysis.results import Results
from harness.config.strategy_traits import BUILTIN_TRAITS, strategy_order
from harness.plan.labels import joined
from harness.report.labels import own_options, settings, shown_devices, shown_strategy
from harness.report.row import Row, Scalar, is_apart, is_missing, number, rows_of

Colour = tuple[float, float, float]
Value = TypeVar("Value")


class ByStrategy(dict[str, Value]):
    """A value for each built-in strategy; others get those of a reserve, in the order in which they are drawn."""

    def __init__(self, values: Mapping[str, Value], reserve: Sequence[Value]) -> None:
        super().__init__(values)
        self._reserve = itertools.cycle(reserve)

    def __missing__(self, strategy: str) -> Value:
        return self.setdefault(strategy, next(self._reserve))


PALETTE: Sequence[Colour] = sns.color_palette("colorblind")
COLOURS = ByStrategy(dict(zip(BUILTIN_TRAITS, PALETTE, strict=False)), PALETTE[len(BUILTIN_TRAITS) :])
MARKERS = ByStrategy({name: traits.marker for name, traits in BUILTIN_TRAITS.items()}, ("v", "P", "X", "h", "<", ">"))
MOST_FACETS = 12
MOST_TICKS = 16
PANEL = (4.6, 3.1)


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption, or no figure and a caption with the reason."""

    title: str
    caption: str
    figure: Figure | None


def not_equivalent_cells(results: Results) -> frozenset[str]:
    """Return the ids of the cells that are not equivalent to one device, which figures of speed mark."""
    return frozenset(results.scaling["cell_id"][results.scaling["excluded"].notna()])


@contextmanager
def style() -> Iterator[None]:
    """Set the style of every figure for a block; the style before is restored."""
    look = {
        **sns.axes_style("whitegrid", {"grid.linestyle": ":", "axes.edgecolor": ".3"}),
        **sns.plotting_context("notebook", font_scale=0.85),
        "font.family": "DejaVu Sans",  # which comes with matplotlib
        "svg.hashsalt": "harness",
        "figure.max_open_warning": 0,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same figures everywhere, whatever matplotlibrc the current folder has
        matplotlib.rcParams.update(look)
        yield


def facets_of(rows: pd.DataFrame, *, batch: bool = True, own: bool = True) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows by setting (see ``settings``), in the order of the table."""
    names = settings(rows, batch=batch, own=own)
    first = list(dict.fromkeys(names))[:MOST_FACETS]
    return [(str(name), rows[names == name]) for name in first]


def make_grid(rows: int, columns: int, height: float = PANEL[1]) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(PANEL[0] * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def panels(
    facets: Sequence[tuple[str, pd.DataFrame]],
    draw: Callable[[Axes, pd.DataFrame], None],
    *,
    legend: Sequence[Artist],
    height: float = PANEL[1],
) -> Figure:
    columns = min(len(facets), 2 if len(facets) in (2, 4) else 3)
    rows = -(-len(facets) // columns)
    figure, grid = make_grid(rows, columns, height)
    flat = [axes for line in grid for axes in line]
    for axes, (name, part) in zip(flat, facets, strict=False):
        draw(axes, part)
        axes.set_title(
            name, y=1.0, parse_math=False
        )  # a name with dollars is no formula; a fixed y is not searched for
    for axes in flat[len(facets) :]:
        axes.set_axis_off()
    add_legend(figure, legend)
    return figure


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    if handles:
        figure.legend(
            handles=list(handles),
            loc="outside upper center",
            ncols=min(len(handles), int(figure.get_figwidth() // 1.1)),
            frameon=False,
        )


def strategy_legend(rows: pd.DataFrame, *, ideal: bool = False) -> list[Line2D]:
    """Return the legend entries of the strategies in the rows; emulated and oversubscribed ones are hollow."""
    entries = []
    for strategy in sorted(rows["strategy"].unique(), key=strategy_order):
        part = rows[rows["strategy"] == strategy]
        marks = part["emulated"].astype(bool) | part["oversubscribed"].astype(bool)
        for apart in (False, True):
            if len(alike := part[marks == apart]):
                first = rows_of(alike[:1])[0]
                entries.append(
                    Line2D(
                        [],
                        [],
                        color=COLOURS[strategy],
                        marker=MARKERS[strategy],
                        markerfacecolor="white" if apart else COLOURS[strategy],
                        linestyle=":" if apart else "-",
                        label=shown_strategy(first) if apart else strategy,
                    )
                )
    return [*entries, Line2D([], [], color="0.45", linestyle="--", label="ideal")] if ideal else entries


def draw_point(axes: Axes, row: Row, value: float, low: Scalar, high: Scalar) -> None:
    strategy, devices = str(row["strategy"]), number(row["devices"])
    if not (is_missing(low) or is_missing(high)):
        error = [[max(value - number(low), 0.0)], [max(number(high) - value, 0.0)]]
        axes.errorbar(devices, value, yerr=error, color=COLOURS[strategy], capsize=3, linewidth=1.2, zorder=3)
    face = "white" if is_apart(row) else COLOURS[strategy]
    if not is_missing(row.get("excluded")):  # hatched: not equivalent
        hatch_point(axes, devices, value)
    axes.plot(
        devices,
        value,
        marker=MARKERS[strategy],
        markersize=6,
        color=COLOURS[strategy],
        markerfacecolor=face,
        zorder=4,
    )


def axis_label(row: Row) -> str:
    """Return 'ddp x2', starred if it is a rehearsal, with the strategy's own options that vary in the run."""
    return joined(f"{row['strategy']} x{shown_devices(row)}{'*' * is_apart(row)}", own_options(row))


def hatch_point(axes: Axes, x: float, y: float) -> None:
    axes.plot(x, y, marker="$////$", markersize=15, color="0.25", zorder=5)


def draw_lines(axes: Axes, rows: pd.DataFrame, x: str, y: str, units: Sequence[str], *, marked: bool = True) -> None:
    """Draw a line for each combination of ``units`` in its strategy's colour, dotted if emulated or oversubscribed."""
    for keys, group in rows.groupby(["strategy", *units], dropna=False, sort=False):
        if len(group) == 1 and not marked:
            continue  # a line of one point without a marker is invisible
        strategy, apart = str(keys[0]), is_apart(rows_of(group[:1])[0])
        sns.lineplot(
            x=group[x].astype(float),
            y=group[y].astype(float),
            ax=axes,
            color=COLOURS[strategy],
            marker=MARKERS[strategy] if marked else None,
            markeredgecolor=COLOURS[strategy],
            markerfacecolor="white" if apart else COLOURS[strategy],
            linestyle=":" if apart else "-",
            linewidth=1.2,
            estimator=None,
        )


def log2_axis(axes: Axes, values: pd.Series[int]) -> None:
    """Set a log2 axis with ticks at the measured values, or at powers of two if there are many values."""
    ticks = sorted({int(value) for value in values.dropna()})
    low, high = ticks[0], ticks[-1]
    if len(ticks) > MOST_TICKS:
        ticks = [2**k for k in range((low - 1).bit_length(), high.bit_length())]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.3, high * 1.3)
