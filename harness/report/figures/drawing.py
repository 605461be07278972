"""Shared parts of figures: style, colour and marker of a strategy, panels, legend, values shown on hover."""

from __future__ import annotations

import io
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from harness.analysis.common import is_no_claim, no_claims
from harness.analysis.results import Results
from harness.config.strategy_traits import BUILTIN_TRAITS, strategy_order
from harness.plan.labels import devices_text, joined
from harness.report.figures.scales import Limits
from harness.report.row import NOT_EQUIVALENT, Row, is_not_equivalent, own_options, rows_of, settings, shown_strategy
from harness.system.files import replace_all, writing

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


class Chart(Figure):
    """A figure with marks, and in a notebook its caption and the figures that follow it."""

    caption = ""
    more: Sequence[Chart] = ()

    def _repr_png_(self) -> bytes:
        return image_of(self, "png")

    def __repr__(self) -> str:
        return self.caption or super().__repr__()

    @cached_property
    def marks(self) -> list[Mark]:
        """The marks, in the order of drawing."""
        return []

    def areas(self) -> Iterator[tuple[str, str]]:
        """Yield the rectangle of each mark as CSS, in per cent of the figure, which has been drawn, and its text."""
        width, height = self.bbox.width, self.bbox.height
        reach = REACH * self.dpi
        for mark in self.marks[:MOST_MARKS]:
            (x, y), (x_end, _) = mark.axes.transData.transform([(mark.x, mark.y), (mark.x_end, mark.y)])
            if not math.isfinite(x + x_end + y):  # a loss that diverged, or 0 on a logarithmic axis
                continue
            left, right = min(x, x_end), max(x, x_end)
            left, right = min(left, (left + right) / 2 - reach), max(right, (left + right) / 2 + reach)
            top, share = 1 - (y + reach) / height, 2 * reach / height
            sides = {"left": left / width, "top": top, "width": (right - left) / width, "height": share}
            yield ";".join(f"{side}:{100 * part:.1f}%" for side, part in sides.items()), mark.text


def mark(axes: Axes, x: float, y: float, text: str, *, x_end: float | None = None) -> None:
    """Note the text of a point, or of a bar that ends at ``x_end``, of a Chart; other figures ignore it."""
    if isinstance(chart := axes.figure, Chart):
        chart.marks.append(Mark(axes, x, y, text, x if x_end is None else x_end))


Colour = tuple[float, float, float]
Facet = tuple[str, pd.DataFrame]
"""The title and the rows of a panel."""


PALETTE: Sequence[Colour] = sns.color_palette("colorblind")
RESERVE = cycle(PALETTE[len(BUILTIN_TRAITS) :]), cycle(("v", "P", "X", "h", "<", ">"))
COLOURS = defaultdict(RESERVE[0].__next__, zip(BUILTIN_TRAITS, PALETTE, strict=False))
MARKERS = defaultdict(RESERVE[1].__next__, {name: traits.marker for name, traits in BUILTIN_TRAITS.items()})
"""The colour and marker of each strategy; one of the user's own gets the next of the reserve when it is first drawn."""
MOST_FACETS = 12
PANEL = (3.6, 2.5)
"""Width and height of a panel in inches."""
WIDTH = 10.8
"""The largest width of a figure in inches: the page's."""
TYPE_SIZE = 9
"""Of all text, in points; the page shows every figure at the same scale."""
LETTER = 0.07
"""The mean width of a letter, in inches."""
TITLE_WIDTH = 50
"""Characters of a line of a panel's title."""
TYPES = (
    *("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"),
    *("legend.fontsize", "legend.title_fontsize", "figure.titlesize"),
)


FILE_KINDS = ("png", "svg")
FILE_DPI, FILE_COLOURS = 192, 256  # twice the pixels of a page, which has 96 an inch


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption; without a figure the caption has the reason.

    ``more``: further figures, of which the page folds the first; the folder has all.
    """

    title: str
    caption: str
    figure: Chart | None
    more: Sequence[Chart] = ()


def image_of(figure: Figure, kind: str, **options: Any) -> bytes:
    """Return a figure in a format, in the style of every figure; ``options``: those of savefig."""
    content = io.BytesIO()
    with style():
        figure.savefig(content, format=kind, **options)
    return content.getvalue()


def figure_files(name: str, figure: Figure) -> dict[str, bytes]:
    """Return the contents of the figure's files, NAME.png and NAME.svg."""
    png = io.BytesIO()
    drawn = Image.open(io.BytesIO(image_of(figure, "png", dpi=FILE_DPI, pil_kwargs={"compress_level": 0})))
    drawn.convert("RGB").quantize(FILE_COLOURS).save(png, format="PNG")  # a third of the bytes; pages are sent
    figure.set_layout_engine("none")  # as it is by now: to compute it again would take a quarter of the time
    return {f"{name}.png": png.getvalue(), f"{name}.svg": image_of(figure, "svg", metadata={"Date": None})}


def write_figure(folder: Path, name: str, draw: Callable[[], Drawing]) -> list[Path]:
    """Write a figure into a folder, beside the report's own; return its paths, none if it is left out."""
    with style():
        drawing = draw()
        if drawing.figure is None:
            return []
        files = figure_files(name, drawing.figure)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / file: content for file, content in files.items()}
    replace_all(paths.items())
    return [*paths]


def not_equivalent_cells(results: Results) -> frozenset[str]:
    """Return the ids of the cells that are not equivalent to one device, which figures of speed mark."""
    return frozenset(results.scaling["cell_id"][results.scaling["equivalence"].eq(NOT_EQUIVALENT)])


@contextmanager
def style() -> Iterator[None]:
    """Set the style of every figure for a block; the style before is restored."""
    look = {
        **sns.axes_style("whitegrid", {"grid.linestyle": ":", "axes.edgecolor": ".3"}),
        **sns.plotting_context("paper"),
        **dict.fromkeys(TYPES, TYPE_SIZE),
        "font.family": "DejaVu Sans",  # which comes with matplotlib
        "svg.hashsalt": "harness",
        "figure.max_open_warning": 0,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same figures everywhere, whatever matplotlibrc the current folder has
        matplotlib.rcParams.update(look)
        yield


def facets_of(rows: pd.DataFrame, *, batch: bool = True, own: bool = True) -> list[Facet]:
    """Return the rows by setting (see ``settings``), in the order of the table."""
    names = settings(rows, batch=batch, own=own)
    return [(str(name), rows[names == name]) for name in names.unique()[:MOST_FACETS]]


def with_several_points(facets: Sequence[Facet], axis: str = "") -> list[Facet]:
    """Return the facets that are drawn: of several points or, with an axis, of several values on it.

    The others are rows of the table alone.
    """
    return [(name, part) for name, part in facets if (part[axis].nunique() if axis else len(part)) > 1]


def make_grid(rows: int, columns: int, panel: tuple[float, float] = PANEL) -> tuple[Chart, list[list[Axes]]]:
    figure = Chart(figsize=(panel[0] * columns, panel[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def merge_single_rows(facets: Sequence[Facet]) -> list[Facet]:
    """Return the facets with those of one row merged into one, in which the column ``label`` names their settings."""
    several, single = ([facet for facet in facets if (len(facet[1]) > 1) == many] for many in (True, False))
    if len(single) < 2:
        return [*several, *single]
    rows = pd.concat([part.assign(label=[joined(str(part["label"].iloc[0]), name)]) for name, part in single])
    return [*several, ("other settings" if several else "", rows)]


def panels(
    facets: Sequence[Facet],
    draw: Callable[[Axes, pd.DataFrame, Limits], None],
    limits: Sequence[Limits],
    *,
    legend: Sequence[Artist],
    height: float = PANEL[1],
    bars: bool = False,
    most_columns: int = 3,
) -> Chart:
    """Draw each facet in a panel of its own with its limits on the axis of values.

    ``bars``: whether each row is a bar under its column ``label``, which sets the size of the panels. The lowest panel
    of a column, and the first of a row if all have the same limits, have the names of the axes; ticks that are those of
    the first panel of a row have no labels.
    """
    width = PANEL[0]
    if bars:
        longest = max(len(label) for _, part in facets for label in part["label"])
        width = min(WIDTH, max(width, width / 2 + LETTER * longest))
        height = max(1.4, 0.7 + 0.26 * max(len(part) for _, part in facets))
    columns = min(len(facets), 2 if len(facets) in (2, 4) else 3, int(WIDTH / width), most_columns)
    is_wide = width > PANEL[0]
    figure, grid = make_grid(-(-len(facets) // columns), columns, (WIDTH / columns if is_wide else width, height))
    flat = [axes for line in grid for axes in line]
    for place, (axes, (name, part), ends) in enumerate(zip(flat, facets, limits, strict=False)):
        draw(axes, part, ends)
        add_title(axes, name, "right" if is_wide else "center")
        if place + columns < len(facets):
            axes.set_xlabel("")
        if place % columns and len({*limits}) == 1:
            axes.set_ylabel("")
    for line in grid:
        hide_repeated_labels(line)
    for axes in flat[len(facets) :]:
        axes.set_axis_off()
    add_legend(figure, legend)
    return figure


def hide_repeated_labels(line: Sequence[Axes]) -> None:
    """Hide the labels of ticks that repeat the first panel of a line."""

    def labels_of(axes: Axes) -> list[tuple[float, str]]:
        return [(float(label.get_position()[1]), label.get_text()) for label in axes.get_yticklabels()]

    for axes in line[1:]:
        if labels_of(axes) == labels_of(line[0]):
            axes.tick_params(labelleft=False)


def add_title(axes: Axes, name: str, place: Literal["left", "center", "right"] = "center") -> None:
    """Set the title of a panel; ``right``: it extends over the labels of bars."""
    # a name with dollars is no formula; a fixed y is not searched for
    axes.set_title(textwrap.fill(name, TITLE_WIDTH), loc=place, y=1.0, parse_math=False)


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    if handles:
        columns = min(len(handles), int(figure.get_figwidth() // 1.1))
        figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, frameon=False)


def strategy_legend(rows: pd.DataFrame, *, ideal: bool = False) -> list[Line2D]:
    """Return the legend entries of the strategies in the rows; those that are no claim about speed are hollow."""
    entries = []
    for strategy in sorted(rows["strategy"].unique(), key=strategy_order):
        part = rows[rows["strategy"] == strategy]
        for apart, group in part.groupby(no_claims(part)):
            label = shown_strategy(rows_of(group[:1])[0]) if apart else strategy
            look = _look(strategy, bool(apart))
            entries.append(Line2D([], [], **look, linestyle=":" if apart else "-", label=label))
    return [*entries, Line2D([], [], color="0.45", linestyle="--", label="ideal")] if ideal else entries


def _look(strategy: str, apart: bool) -> dict[str, Any]:
    """Return the colour and marker of a strategy; ``apart``: hollow, for rows that are no claim about speed."""
    colour = COLOURS[strategy]
    return {"color": colour, "marker": MARKERS[strategy], "markerfacecolor": "white" if apart else colour}


def draw_point(axes: Axes, x: float, y: float, row: Row, **options: Any) -> None:
    """Draw the marker of a row's strategy, hollow if it is no claim about speed, hatched if it is not equivalent."""
    if is_not_equivalent(row):
        hatch_point(axes, x, y)
    axes.plot(x, y, **_look(row.strategy, is_no_claim(row)), zorder=4, **options)


def axis_label(row: Row) -> str:
    """Return 'ddp x2', starred if it is a rehearsal, with the strategy's own options that vary in the run."""
    return joined(f"{row.strategy} x{devices_text(row)}{'*' * is_no_claim(row)}", own_options(row))


def hatch_point(axes: Axes, x: float, y: float) -> None:
    axes.plot(x, y, marker="$////$", markersize=15, color="0.25", zorder=5)


def draw_lines(axes: Axes, rows: pd.DataFrame, x: str, y: str, units: Sequence[str], *, marked: bool = True) -> None:
    """Draw a line for each combination of ``units`` in its strategy's colour, dotted if it is no claim."""
    for keys, group in rows.groupby(["strategy", *units], dropna=False, sort=False):
        if len(group) == 1 and not marked:
            continue  # a line of one point without a marker is invisible
        strategy, apart = str(keys[0]), is_no_claim(rows_of(group[:1])[0])
        look = _look(strategy, apart) | {"markeredgecolor": COLOURS[strategy], "linestyle": ":" if apart else "-"}
        if not marked:
            look["marker"] = None
        places, values = (group[name].astype(float).to_numpy() for name in (x, y))  # a series would name the axes
        sns.lineplot(x=places, y=values, ax=axes, linewidth=1.2, estimator=None, **look)


def name_line(axes: Axes, name: str, at: tuple[float, float], strategy: str) -> None:
    """Write a name, such as the number of devices, beside the last point of a strategy's line."""
    axes.annotate(name, at, xytext=(7, -3), textcoords="offset points", color=COLOURS[strategy])
