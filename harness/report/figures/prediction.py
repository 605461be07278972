"""Predicted step times against devices, beside what was measured and simpler laws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.analysis.results import Results
from harness.report.figures import captions
from harness.report.figures.drawing import COLOURS, MOST_FACETS, Drawing, Facet, add_legend, mark, panels, write_figure
from harness.report.figures.scales import Limits, common_limits, device_axis, draw_interval, log_limits, log_values
from harness.report.row import is_missing, rows_of
from harness.report.tables.prediction import MILLISECONDS, family_label

LAWS: Mapping[str, tuple[str, Literal["--", "-.", ":"]]] = {
    "ideal_s": ("ideal", "--"),
    "amdahl_s": ("Amdahl", "-."),
    "ring_line_s": ("ring line", ":"),
}
"""The label and the line of each law."""
TITLE = "Predicted step time against devices"
MEASURED, BAND = "0.1", 0.25
LEAST_WIDTH = 5.4
"""Inches that the legend needs."""


def predicted_steps(results: Results) -> Drawing:
    """Draw each predicted step with its interval, the measured one and its interval, and the laws' steps."""
    return _drawing_of(results.prediction)


def _drawing_of(prediction: pd.DataFrame) -> Drawing:
    """Draw a table of predictions, a panel a family; sizes that are not predicted are left out."""
    predicted = prediction[prediction["step_s"].notna()]
    known = prediction[prediction["family_id"].isin(predicted["family_id"])]
    if known.empty:
        return Drawing(TITLE, "Left out: no size is predicted.", None)
    every: list[Facet] = [
        (family_label(rows_of(part)[0]), part.sort_values("devices"))
        for _, part in known.groupby("family_id", sort=False)
    ]
    facets = every[:MOST_FACETS]
    limits = common_limits([_limits(part) for _, part in facets], log=True)
    devices = pd.concat([part["devices"] for _, part in facets])

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        device_axis(axes, devices)
        log_values(axes, "y", ends)
        for name, (_, line) in LAWS.items():
            places, step_s = (_numbers(part.loc[part[name].notna(), column]) for column in ("devices", name))
            axes.plot(places, 1e3 * step_s, color="0.5", linestyle=line, linewidth=1)
        _draw_predicted(axes, part[part["step_s"].notna()])
        for row in rows_of(part[part["measured_s"].notna()]):
            value = 1e3 * row.measured_s
            interval = [None if is_missing(end) else 1e3 * end for end in (row.measured_low, row.measured_high)]
            draw_interval(axes, "y", row.devices, (interval[0], interval[1]), ends, MEASURED)
            axes.plot(row.devices, value, marker="x", markersize=6, color=MEASURED, zorder=5)
            mark(axes, row.devices, value, f"{row.devices} devices, measured: {value:.4g} ms")
        axes.set_ylabel("step time (ms)")

    caption = (
        "Mean step of a new run and its 95 % prediction interval (band), each size predicted from smaller measured "
        "ones; black: measured, with its 95 % interval. Lines: the same by laws that know nothing of the step's parts, "
        f"fitted to the same sizes.{captions.cut(every)}{captions.scales(limits)}"
    )
    figure = panels(facets, draw, limits, legend=())
    figure.set_figwidth(max(LEAST_WIDTH, figure.get_figwidth()))
    strategies = dict.fromkeys(map(str, known["strategy"]))
    legend: list[Artist] = [
        *(Line2D([], [], color=COLOURS[name], marker="o", label=f"{name}, predicted") for name in strategies),
        Patch(color="0.5", alpha=BAND, label="95 % interval"),
        Line2D([], [], color=MEASURED, marker="x", linestyle="", label="measured"),
        *(Line2D([], [], color="0.5", linestyle=line, label=label) for label, line in LAWS.values()),
    ]
    add_legend(figure, legend)
    return Drawing(TITLE, caption, figure)


def write_prediction(folder: Path, prediction: pd.DataFrame) -> list[Path]:
    """Write the figure of asked predictions into a folder; return its paths, none without."""
    return write_figure(folder, "prediction_asked", lambda: _drawing_of(prediction))


def _draw_predicted(axes: Axes, part: pd.DataFrame) -> None:
    """Draw the band and the line of a family; a single size has a bar."""
    colour = COLOURS[str(part["strategy"].iloc[0])]
    devices, low, high = (_numbers(part[name]) for name in ("devices", "low", "high"))
    if len(part) == 1:
        axes.plot([devices[0]] * 2, [1e3 * low[0], 1e3 * high[0]], color=colour, linewidth=6, alpha=BAND)
    else:
        axes.fill_between(devices, 1e3 * low, 1e3 * high, color=colour, alpha=BAND, linewidth=0)
    axes.plot(devices, 1e3 * _numbers(part["step_s"]), color=colour, marker="o", markersize=4, linewidth=1.2)
    for row in rows_of(part):
        ends = "" if is_missing(row.low) else f" ({MILLISECONDS(row.low)} to {MILLISECONDS(row.high)})"
        text = f"{row.devices} devices, predicted: {MILLISECONDS(row.step_s)} ms{ends}"
        mark(axes, row.devices, 1e3 * row.step_s, text)


def _limits(part: pd.DataFrame) -> Limits:
    names = ("step_s", "measured_s", "ideal_s", "ring_line_s")
    values = [1e3 * float(value) for name in names for value in part[name].dropna()]
    return log_limits(values, [1e3 * float(end) for name in ("low", "high") for end in part[name].dropna()])


def _numbers(values: pd.Series[float]) -> np.ndarray:
    return values.astype(float).to_numpy()
