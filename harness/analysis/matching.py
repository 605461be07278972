"""Cells of different runs: which of them have the same content but for some axes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from harness.analysis.common import Row
from harness.config.values import PlainValue
from harness.plan.cell import is_wanted, option_value
from harness.plan.comparison import CELL_AXES, NOT_NAMED, is_own_option

BATCHES = frozenset({"per_device_batch_size", "global_batch_size"})


def axis_value(row: Row, name: str) -> PlainValue:
    """Return a recorded cell's value on an axis or option, as ``Cell.axis`` does; None if it has none."""
    if "." in name:
        return option_value(row["options"] or {}, name, str(row["strategy"]))
    if name == "device_ids":
        return [int(number) for number in str(row[name]).split(",")] if row[name] is not None else []
    value: PlainValue = row[name]
    return value


def matches(row: Row, wanted: Mapping[str, PlainValue]) -> bool:
    """Return whether a recorded cell has, on every named axis, the wanted value or one of the wanted values."""
    return all(is_wanted(values, axis_value(row, name)) for name, values in wanted.items())


def content_key(row: Row, by: Iterable[str] = ()) -> str:
    """Return what cells have in common that agree in all axes and options but those of ``by``.

    The batch that is held fixed counts, not the one that follows from it and the devices. With the strategy its own
    options are left out too.
    """
    return json.dumps(_content(row, frozenset(by)), sort_keys=True, default=str)


def differing_axes(row: Row, other: Row) -> list[str]:
    """Return the axes and options in which two cells differ, by name."""
    mine, others = _content(row, frozenset()), _content(other, frozenset())
    return [name for name in {**mine, **others} if mine.get(name) != others.get(name)]


def _content(row: Row, by: frozenset[str]) -> dict[str, object]:
    without = by | NOT_NAMED - {"scaling", "oversubscribed"}
    without |= BATCHES if by & BATCHES else {_following_batch(row)}
    axes = {name: row[name] for name in CELL_AXES if name not in without}
    return {**axes, **{name: value for name, value in _options(row, by) if name not in by}}


def _following_batch(row: Row) -> str:
    return "per_device_batch_size" if row["scaling"] == "strong" else "global_batch_size"


def _options(row: Row, by: frozenset[str]) -> Iterator[tuple[str, PlainValue]]:
    options: Mapping[str, PlainValue] = row["options"] or {}
    return ((name, value) for name, value in options.items() if not ("strategy" in by and is_own_option(row, name)))
