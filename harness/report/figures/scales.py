"""Axes of figures: ticks, limits that compared panels share, and intervals that end at the limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.report.row import Scalar, is_missing, number

Limits = tuple[float, float]
Direction = Literal["x", "y"]
ROUND = (1, 2, 5, 10)
"""The steps of ticks, times powers of ten."""
FEW, MANY = 3, 8
"""The fewest ticks of 1, 2 and 5 times powers of ten that describe an axis, and the most that are drawn."""
MOST_TICKS = 16
SHARED_LENGTH = 3.0
"""Panels share their limits if these are at most as many times longer than the shortest panel's own."""
WIDEST = 2.0
"""The factor by which intervals may extend a logarithmic axis beyond its values; the rest of them is clipped."""
CAPS = {"x": ("|", "|"), "y": ("_", "_")}
ARROWS = {"x": ("<", ">"), "y": ("v", "^")}


def value_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis: 1, 2 and 5 times powers of ten or, if these are too few, equal steps."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in ROUND[:-1]]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < FEW:
        steps = MaxNLocator(nbins=5, steps=ROUND).tick_values(low, high)
        return [float(tick) for tick in steps if low <= tick <= high]
    if len(ticks) > MANY:
        powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
        return powers[:: -(-len(powers) // MANY)]
    return ticks


def tick_text(value: float) -> str:
    """Return '20,000', '0.05' or '1.5'."""
    return f"{value:,.10g}"


def log_values(axes: Axes, direction: Direction, limits: Limits) -> None:
    """Set a logarithmic axis of values with these limits."""
    ticks = value_ticks(*limits)
    axes.set(**{f"{direction}scale": "log", f"{direction}lim": limits})
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_ticks(ticks, [tick_text(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def linear_values(
    axes: Axes, direction: Direction, limits: Limits | None = None, *, percent: bool = False, steps: int = 6
) -> None:
    """Set a linear axis of values, with at most that many steps of 1, 2 or 5; ``percent``: shows 0.5 as '50 %'."""
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=steps, steps=ROUND))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g} %" if percent else tick_text(value)))
    if limits:
        axes.set(**{f"{direction}lim": limits})


def device_axis(axes: Axes, devices: pd.Series[int]) -> None:
    """Set a log2 axis with ticks at 1, 2, 4, 8 ...; at the measured numbers if it holds no power of two."""
    log2_axis(axes, devices, most_ticks=0)
    axes.set_xlabel("devices")


def log2_axis(axes: Axes, values: pd.Series[int], most_ticks: int = MOST_TICKS) -> None:
    """Set a log2 axis with ticks at the measured values, or at the powers of two among more than ``most_ticks``."""
    ticks = sorted({int(value) for value in values.dropna()})
    low, high = ticks[0], ticks[-1]
    if len(ticks) > most_ticks:
        ticks = [2**k for k in range((low - 1).bit_length(), high.bit_length())] or ticks
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low / 1.3, high * 1.3)


def common_limits(limits: Sequence[Limits], *, log: bool = False) -> list[Limits]:
    """Return the limits of each panel: one for all, unless a panel's own would fill too little of them."""
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    whole, *lengths = (math.log(end / start) if log else end - start for start, end in ((low, high), *limits))
    return [(low, high)] * len(limits) if whole <= SHARED_LENGTH * min(lengths) else [*limits]


def log_limits(values: Iterable[float], ends: Iterable[Scalar]) -> Limits:
    """Return limits of a logarithmic axis around values, and around the ends of their intervals up to a factor of 2."""
    low, high = min(known := [*values]), max(known)
    reach = [number(end) for end in ends if not is_missing(end)]
    low = max(min([low, *reach]), low / WIDEST)
    high = min(max([high, *reach]), high * WIDEST)
    margin = max(1.1, (high / low) ** 0.06)
    return low / margin, high * margin


def draw_interval(
    axes: Axes,
    direction: Direction,
    place: float,
    ends: tuple[Scalar, Scalar],
    limits: Limits,
    colour: str | tuple[float, ...],
) -> None:
    """Draw an interval along a direction, with an arrow where it exceeds the limits; nothing if it is missing."""
    if is_missing(ends[0]) or is_missing(ends[1]):
        return
    low, high = number(ends[0]), number(ends[1])
    inside = min(max(low, limits[0]), limits[1]), max(min(high, limits[1]), limits[0])
    clipped = low < limits[0], high > limits[1]
    xy = (inside, (place, place)) if direction == "x" else ((place, place), inside)
    axes.plot(*xy, color=colour, linewidth=1.2, zorder=3)
    for end, is_clipped, cap, arrow in zip(inside, clipped, CAPS[direction], ARROWS[direction], strict=True):
        at = (end, place) if direction == "x" else (place, end)
        axes.plot(*at, marker=arrow if is_clipped else cap, markersize=5, color=colour, zorder=3, clip_on=False)
