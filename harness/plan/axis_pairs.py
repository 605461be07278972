"""Pairs of cells that differ in one axis: what the table versus compares, and the number of blocks follows.

Values of an axis are compared as neighbours in their order, and the last with the first: buckets of 1, 25 and 100 MB
give 25 / 1, 100 / 25 and 100 / 1. Placements (device_ids) have no order: each is compared with the first of the
experiment file, their common base. The launcher is left out: the table parity compares Ray with torchrun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, get_args

from harness.config.sections import PrecisionName
from harness.config.strategy_traits import strategy_order
from harness.plan.cell import EARLIER
from harness.plan.comparison import CELL_AXES, beside_strategies, is_own_option, options_of

Axes = Mapping[str, object]
"""A cell's value on each of CELL_AXES, its options among them."""
Item = TypeVar("Item")

FOLLOWERS: Mapping[str, frozenset[str]] = {
    "strategy": frozenset({"emulated", "oversubscribed"}),
    "devices": frozenset({"nodes", "device_ids", "oversubscribed", "emulated"}),
    "per_device_batch_size": frozenset({"global_batch_size"}),
    "global_batch_size": frozenset({"per_device_batch_size"}),
}
"""The axes that may differ with an axis because they follow from it."""
PRECISIONS = get_args(PrecisionName)
SIZES = frozenset({"data", "model", "devices", "per_device_batch_size", "global_batch_size"})
"""The axes that set the size of the problem, which is no choice: throughput.blocks asks no width of their intervals."""
NOT_COMPARED = frozenset(
    {"workload", "device", "launcher", "scaling", "oversubscribed", "emulated", "emulated_compute", "options"}
)


class AxisPair(NamedTuple, Generic[Item]):
    """Two cells that differ in ``axis``, an axis of the grid or an option; ``other`` comes first in the axis' order."""

    axis: str
    one: Item
    other: Item
    value: str
    other_value: str


def axis_pairs(cells: Iterable[tuple[Axes, Item]], placements: Sequence[str] = ()) -> list[AxisPair[Item]]:
    """Return the pairs of every axis that varies among these cells, axis by axis.

    ``placements``: the values of device_ids, '6,7', in the order of the experiment file.
    """
    known = list(cells)
    pairs: list[AxisPair[Item]] = []
    for axis in varying_axes([axes for axes, _ in known]):
        groups: dict[str, list[tuple[Axes, Item]]] = {}
        for axes, item in known:
            if _is_compared(axis, axes):
                groups.setdefault(_held_fixed(axis, axes), []).append((axes, item))
        for group in groups.values():
            pairs += _pairs_of(axis, group, placements)
    return pairs


def varying_axes(cells: Sequence[Axes]) -> list[str]:
    """Return the axes and options that have several values among these cells, without those that only follow others."""
    batch = {_batch_axis(axes) for axes in cells}
    named = [axis for axis in CELL_AXES if axis not in NOT_COMPARED]
    named = [axis for axis in named if not axis.endswith("batch_size") or axis in batch]
    options = dict.fromkeys(name for axes in cells for name in options_of(axes))
    return [axis for axis in (*named, *options) if len({_key(axis_value(axis, axes)) for axes in cells}) > 1]


def axis_value(axis: str, axes: Axes) -> object:
    """Return a cell's value on an axis or option, that of earlier versions if it lacks the option; None if unset."""
    if "." in axis:
        return options_of(axes).get(axis, EARLIER.get(axis))
    return axes.get(axis)


def value_text(value: object) -> str:
    """Return a value of an axis as it stands in the experiment file; 'unset' for none."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _pairs_of(axis: str, group: Sequence[tuple[Axes, Item]], placements: Sequence[str]) -> list[AxisPair[Item]]:
    """Return the pairs among cells that differ in the axis alone; cells of one value are each paired."""
    by_value: dict[str, list[Item]] = {}
    for axes, item in sorted(group, key=lambda cell: _order(axis, axis_value(axis, cell[0]), placements)):
        by_value.setdefault(value_text(axis_value(axis, axes)), []).append(item)
    values = list(by_value)
    wanted = [*pairwise(values), *([(values[0], values[-1])] if len(values) > 2 else [])]
    if axis == "device_ids":
        wanted = [(values[0], value) for value in values[1:]]
    return [
        AxisPair(axis, one, other, value, other_value)
        for other_value, value in wanted
        for other in by_value[other_value]
        for one in by_value[value]
    ]


def _is_compared(axis: str, axes: Axes) -> bool:
    """Return whether a cell has a place on the axis: strategies are compared on several devices, against no bare model.

    An option of a strategy is compared among cells of that strategy.
    """
    if axis == "strategy":
        return beside_strategies(axes)
    if axis.endswith("batch_size"):
        return axis == _batch_axis(axes)
    return "." not in axis or axis in options_of(axes) or axis_value(axis, axes) is not None


def _held_fixed(axis: str, axes: Axes) -> str:
    """Return what cells that are compared along the axis have in common, as text."""
    follow = FOLLOWERS.get(axis, frozenset()) | {axis, "options"}
    if axis == "devices":
        follow |= {"global_batch_size", "per_device_batch_size"} - {_batch_axis(axes)}
    options = {
        name: value
        for name, value in options_of(axes).items()
        if name != axis and not (axis == "strategy" and is_own_option(axes, name))
    }
    fixed = {name: _key(axes.get(name)) for name in CELL_AXES if name not in follow}
    return json.dumps([fixed, options], sort_keys=True, default=str)


def _batch_axis(axes: Axes) -> str:
    return "global_batch_size" if axes.get("scaling") == "strong" else "per_device_batch_size"


def _key(value: object) -> Hashable:
    """Return a missing value as None, a number as such and anything else as text."""
    if value is None:
        return None
    return value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


def _order(axis: str, value: object, placements: Sequence[str]) -> tuple[object, ...]:
    """Return a sort key: none or an option's usual value, numbers, texts; strategies and precisions by their tables.

    Variants are equal: they stay in the order of the cells, which is to be that of the experiment file.
    """
    if axis == "strategy":
        return (0, strategy_order(str(value)))
    if axis == "variant":
        return (0,)
    if axis == "device_ids" and value in placements:
        return (0, placements.index(str(value)))
    if axis == "precision" and value in PRECISIONS:
        return (0, PRECISIONS.index(value))
    if value is None or (axis in EARLIER and value == EARLIER[axis]):
        return (0,)
    if isinstance(value, bool | int | float):
        return (1, value)
    return (2, natural(value_text(value)))


def natural(value: object) -> object:
    """Return a sort key that puts resnet8 before resnet14; anything but text is returned unchanged."""
    if not isinstance(value, str):
        return value
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"([0-9]+)", value)]
