"""A figure that knows the values of its marks, which the page shows on hover."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from matplotlib.axes import Axes
from matplotlib.figure import Figure

MOST_MARKS = 400
"""The most marks of a figure: each takes about 120 bytes of the page."""
REACH = 0.09
"""Half the width of a point's area, in inches."""


@dataclass(frozen=True)
class Mark:
    """The text of a point, or of a bar from ``x`` to ``x_end``, in the coordinates of its axes."""

    axes: Axes
    x: float
    y: float
    text: str
    x_end: float


@dataclass(frozen=True)
class Area:
    """The rectangle of a mark as shares of the figure's width and height, from its upper left corner."""

    left: float
    top: float
    width: float
    height: float
    text: str

    @property
    def style(self) -> str:
        """The rectangle as CSS, in per cent of the figure."""
        sides = {"left": self.left, "top": self.top, "width": self.width, "height": self.height}
        return ";".join(f"{side}:{100 * share:.1f}%" for side, share in sides.items())


class Chart(Figure):
    """A figure with marks."""

    @cached_property
    def marks(self) -> list[Mark]:
        """The marks, in the order of drawing."""
        return []

    def areas(self) -> Iterator[Area]:
        """Yield the area of each mark; the figure must have been drawn, which lays it out."""
        width, height = self.bbox.width, self.bbox.height
        reach = REACH * self.dpi
        for mark in self.marks[:MOST_MARKS]:
            (x, y), (x_end, _) = mark.axes.transData.transform([(mark.x, mark.y), (mark.x_end, mark.y)])
            if not math.isfinite(x + x_end + y):  # a loss that diverged, or 0 on a logarithmic axis
                continue
            left, right = min(x, x_end), max(x, x_end)
            left, right = min(left, (left + right) / 2 - reach), max(right, (left + right) / 2 + reach)
            yield Area(left / width, 1 - (y + reach) / height, (right - left) / width, 2 * reach / height, mark.text)


def mark(axes: Axes, x: float, y: float, text: str, *, x_end: float | None = None) -> None:
    """Note the text of a point, or of a bar that ends at ``x_end``, of a Chart; other figures ignore it."""
    if isinstance(chart := axes.figure, Chart):
        chart.marks.append(Mark(axes, x, y, text, x if x_end is None else x_end))
