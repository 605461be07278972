"""Published figures of an experiment file: what others measured of a cell, to stand beside what is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from harness.config.axes import Filter
from harness.config.problems import Conflict, raise_conflicts
from harness.config.strategy_traits import Strict
from harness.config.values import Text, as_tuple, one_of

Level = Literal["epochs", "steps", "cells"]


class Metric(NamedTuple):
    """A column of the tables epochs, steps or cells that a published figure may be of: its kind of unit, its title."""

    level: Level
    unit: str
    title: str


RATE = "1/s"
"""The kind of a throughput: the workload counts in one of its units, between which there is no factor."""
METRICS: Mapping[str, Metric] = {
    "train_loss": Metric("epochs", "", "training loss"),
    "train_accuracy": Metric("epochs", "1", "training accuracy"),
    "val_loss": Metric("epochs", "", "validation loss"),
    "val_accuracy": Metric("epochs", "1", "validation accuracy"),
    "val_perplexity": Metric("epochs", "", "validation perplexity"),
    "val_psnr": Metric("epochs", "dB", "validation PSNR"),
    "val_iou": Metric("epochs", "1", "validation IoU"),
    "loss": Metric("steps", "", "loss"),
    "running_loss": Metric("steps", "", "mean loss so far"),
    "step_s": Metric("steps", "s", "step time"),
    "throughput_per_s": Metric("cells", RATE, "throughput"),
    "peak_memory_bytes": Metric("cells", "bytes", "peak memory"),
}
"""``running_loss``: the mean of the losses of all steps so far. ``step_s`` without ``at``: the median of each block."""
UNITS: Mapping[str, Mapping[str, float]] = {
    "": {},
    "1": {"1": 1.0, "%": 0.01},
    "dB": {"dB": 1.0},
    "s": {"s": 1.0, "ms": 0.001},
    RATE: {"samples/s": 1.0, "tokens/s": 1.0},
    "bytes": {"bytes": 1.0, "MiB": 2.0**20, "GiB": 2.0**30},
}
"""The units of each kind, with the factor to that of the column; the first is the column's own."""
Figure = float | Literal["nan"]
Position = Annotated[int, Field(ge=1, le=1_000_000_000)]
MOST_FIGURES = 1000


class At(Strict):
    """The epoch or the step of a figure, counted from 1; of several ``values`` the first one's."""

    epoch: Position | None = None
    step: Position | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.epoch is None) == (self.step is None):
            raise ValueError("give exactly one of epoch and step")
        return self


class Published(Strict):
    """Figures that others published of one cell, which ``cell`` selects by its axes; no part of any cell's id.

    One figure (``value``), a ``range`` from the lowest to the highest, or ``values`` of consecutive epochs or steps;
    nan for a loss that was no number. ``unit``: by default the column's, of a throughput the workload's. ``hardware``:
    what they were measured on.
    """

    metric: Annotated[Text, AfterValidator(one_of(METRICS))]
    value: Figure | None = None
    range: Annotated[tuple[float, float] | None, BeforeValidator(as_tuple)] = None
    values: Annotated[
        Annotated[tuple[Figure, ...], Field(min_length=1, max_length=MOST_FIGURES)] | None, BeforeValidator(as_tuple)
    ] = None
    at: At | None = None
    unit: Text | None = None
    cell: Filter
    source: Text
    url: Text | None = None
    hardware: Text

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_conflicts(self._conflicts())
        return self

    def _conflicts(self) -> Iterator[Conflict]:
        level, kind, _ = METRICS[self.metric]
        figures = ("value", "range", "values")
        place = {"epochs": "epoch", "steps": "step"}.get(level, "")
        has = "epoch" if self.at and self.at.epoch else "step" if self.at else ""
        if len(given := [name for name in figures if getattr(self, name) is not None]) != 1:
            text = f"got {', '.join(given) or 'no figure'}; give exactly one of value, range and values"
            yield Conflict(text, figures)
        if self.range and not self.range[0] <= self.range[1]:
            yield Conflict(f"range: got {list(self.range)}; allowed: the lowest figure, then the highest", ("range",))
        if has and has != place:
            allowed = place or "no at, since it is a figure of the whole cell"
            yield Conflict(f"at: got {has} for {self.metric}; allowed: {allowed}", ("at", "metric"))
        if self.values and not place:
            allowed = "value or range, since it has neither epochs nor steps"
            yield Conflict(f"values: got several of {self.metric}; allowed: {allowed}", ("values", "metric"))
        if level == "steps" and self.metric != "step_s" and self.values is None and not has:
            yield Conflict(f"at: {self.metric} is a figure of one step; give at: {{step: n}}", ("at", "metric"))
        if self.unit and self.unit not in UNITS[kind]:
            allowed = ", ".join(UNITS[kind]) or "none: the figure has no unit"
            yield Conflict(f"unit: got {self.unit[:80]!r} for {self.metric}; allowed: {allowed}", ("unit", "metric"))

    @property
    def level(self) -> Level:
        """The table of the metric; a step time without a step is the median of each block."""
        return "cells" if self.metric == "step_s" and not (self.at or self.values) else METRICS[self.metric].level

    @property
    def figures(self) -> tuple[tuple[int | None, float, float], ...]:
        """The epoch or step, None for the last epoch or the whole cell, and the lowest and highest figure of each.

        In the unit of the column.
        """
        first = (self.at.epoch or self.at.step) if self.at else 1 if self.values else None
        factor = UNITS[METRICS[self.metric].unit].get(self.unit or "", 1.0)
        if self.range is not None:
            return ((first, self.range[0] * factor, self.range[1] * factor),)
        values = [float(value) * factor for value in self.values or (self.value,) if value is not None]
        return tuple((first + i if first else None, value, value) for i, value in enumerate(values))
