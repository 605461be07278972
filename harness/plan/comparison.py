"""Which cells are compared with which: the one definition, for the planner, a resumed run and the tables.

Ratios are taken between trials of one block, so the partners of a cell are measured beside it:

    base                single device, bare model, same batch held fixed      speedup, efficiency
    single-device cell  bare model at the same per-device batch               waterfall
    wrapped cell        same strategy on one device, same per-device batch    waterfall
    equivalence cell    a few steps, against its own base                     whether a ratio is allowed
    family              cells that differ in their devices alone              stands in for a base that failed
    launchers           the cell under Ray and under torchrun                 parity
    variants            cells that differ in the version of the user's code   versus

The first four are cells, recorded with a trial as base_id, alone_id, wrapped_id and check_id. The others are sets of
cells: cells of one set share its id, a hash of what they have in common. Sets of variants are not recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, cast, get_args

from harness.config.axes import AXES, BATCHES, CELL_AXES, LATER, LauncherName, PrecisionName, TrialAxes, batch_axis
from harness.config.sections import ACCUMULATION
from harness.config.strategy_traits import BASE_STRATEGY, strategy_order
from harness.plan.cell import MOST_MICRO_BATCH, Cell, format_gpu_ids, share_of
from harness.plan.rows import PartnerIds, SetIds

REDUCED_PRECISIONS = ("bf16", "fp16")
MAX_DIFFERENCE = 0.01
"""The largest relative difference (norm over norm) of gradients and updates, against those of one device, that rounding
is given; a wrong share or factor gives 0.1 and more."""


def axes_of(cell: Cell) -> TrialAxes:
    """Return a cell's value on each axis of the tables."""
    values = {name: getattr(cell, name) for name in CELL_AXES} | {"device_ids": format_gpu_ids(cell.device_ids) or None}
    return cast("TrialAxes", values)


def comparable(cell: Cell) -> bool:
    """Return whether the cell has partners; a global batch that does not divide is skipped, never changed."""
    return bool(cell.per_device_batch_size)


@lru_cache(maxsize=16_384)  # a plan asks for the base of each cell several times
def base_cell(cell: Cell) -> Cell:
    """Return the cell that ratios are taken against: the bare model on one device, at the same batch.

    The same per-device batch under weak scaling, the same global batch under strong scaling. If the cell names its
    GPUs, the base runs on the first of them.
    """
    batch = cell.global_batch_size if cell.scaling == "strong" else cell.per_device_batch_size
    return _on_one_device(cell, batch, bare=True)


def single_device_cell(cell: Cell) -> Cell:
    """Return the bare model on one device at this cell's per-device batch: one device's part of its step."""
    return _on_one_device(cell, cell.per_device_batch_size, bare=True)


def wrapped_single_device_cell(cell: Cell) -> Cell:
    """Return the same strategy on one device at this cell's per-device batch: the cost of the wrapper itself."""
    return _on_one_device(cell, cell.per_device_batch_size, bare=False)


def _on_one_device(cell: Cell, batch: int | None, *, bare: bool) -> Cell:
    bare = bare and not cell.traits.own_program
    return replace(
        cell,
        strategy=BASE_STRATEGY if bare else cell.strategy,
        own_traits=None if bare else cell.own_traits,
        devices=1,
        nodes=1,
        oversubscribed=False,
        device_ids=cell.device_ids[:1],
        strategy_options={} if bare else cell.strategy_options,
        uneven=None,
        per_device_batch_size=batch,
        global_batch_size=batch or cell.global_batch_size,
    ).with_micro_batches()


def equivalence_cell(cell: Cell, batch: int) -> Cell:
    """Return the cell whose few steps show that this one trains as one device does; ``batch`` is the global one.

    The steps are taken in fp32, and again in bf16 or fp16 if the cell trains in it.
    """
    # of the training options those that a small batch can have: others would split it, or shrink the step
    kept = {name: value for name, value in cell.training.items() if name.startswith("clip_")}
    return replace(
        cell.eager,
        training=kept,
        scaling="strong",
        uneven=None,
        per_device_batch_size=share_of(batch, cell.devices),
        global_batch_size=batch,
        precision=cell.precision if cell.precision in REDUCED_PRECISIONS else "fp32",
        loader={},
        schedule={},
    )


def other_launcher_cells(cell: Cell) -> list[Cell]:
    """Return the same cell under every other launcher."""
    return [replace(cell, launcher=launcher) for launcher in get_args(LauncherName) if launcher != cell.launcher]


def base_cells(cells: Iterable[Cell]) -> dict[Cell, None]:
    """Return the bases of the comparable ones of these cells, each once, in order."""
    return dict.fromkeys(base_cell(cell) for cell in cells if comparable(cell))


def explaining_cells(cells: Iterable[Cell]) -> dict[Cell, None]:
    """Return the cells that the waterfall of these needs: one device at the same batch, bare and,
    if its wrapper has a cost, wrapped.
    """
    wanted: dict[Cell, None] = {}
    for cell in cells:
        if cell.devices > 1 and comparable(cell):
            wanted[single_device_cell(cell)] = None
            if cell.traits.wrapper_cost:
                wanted[wrapped_single_device_cell(cell)] = None
    return wanted


def partner_ids(cell: Cell, *, equivalence: bool = False) -> PartnerIds:
    """Return base_id, alone_id and wrapped_id, None if the cell has no such partner.

    ``equivalence``: the cell is that of a check, whose base trains on the same global batch even if it is uneven.
    """
    divides = comparable(cell)
    return {
        "base_id": base_cell(cell).id if divides or equivalence or cell.uneven else None,
        "alone_id": single_device_cell(cell).id if divides else None,
        "wrapped_id": wrapped_single_device_cell(cell).id if divides else None,
    }


def set_ids(axes: Mapping[str, object]) -> SetIds:
    """Return family_id and launchers_id of a cell, given its value on each of CELL_AXES.

    Cells of a family hold the same batch fixed: the global one under strong scaling, else the per-device one.
    """
    placed = {name for name in CELL_AXES if AXES[name].placement}
    return {
        "family_id": _digest(axes, placed | {*BATCHES}, axes.get(batch_axis(axes.get("scaling")))),
        "launchers_id": _digest(axes, {"launcher"}),
    }


def options_of(axes: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options among a cell's values; empty if there are none. Raises TypeError if they are no mapping."""
    options = axes.get("options") or {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options: expected a mapping, got {type(options).__name__}")
    return options


def fixed_options(axes: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options that do not follow from the devices, as micro-batches do with ``accumulation: auto``."""
    options = options_of(axes)
    automatic = f"training.{MOST_MICRO_BATCH}" in options
    return {name: value for name, value in options.items() if not (automatic and name == ACCUMULATION)}


def backend_of(axes: Mapping[str, object]) -> str:
    """Return the backend that exchanges tensors between the ranks of a cell, given its columns: nccl or gloo."""
    by_gloo = options_of(axes).get(f"{axes['strategy']}.backend") == "gloo" or axes["oversubscribed"]
    return "nccl" if axes["device"] == "cuda" and not by_gloo else "gloo"


def is_own_option(axes: Mapping[str, object], name: str) -> bool:
    """Return whether an option is one of the cell's strategy, and of no other."""
    return name.startswith(f"{axes['strategy']}.")


def options_text(options: Mapping[str, object]) -> str:
    """Return options as they stand in files and in hashes: JSON with sorted keys."""
    return json.dumps(options, sort_keys=True)


def _digest(axes: Mapping[str, object], without: Collection[str], *more: object) -> str:
    values = {**axes, "options": options_text(fixed_options(axes))}
    shared = [values.get(name) for name in CELL_AXES if name not in without and name not in LATER]
    shared += [f"{name}={values[name]}" for name, default in LATER.items() if values.get(name, default) != default]
    text = json.dumps([*shared, *more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


Axes = Mapping[str, object]
"""A cell's value on each of CELL_AXES, its options among them."""
Item = TypeVar("Item")

PRECISIONS = get_args(PrecisionName)
NOT_COMPARED = frozenset({"workload", "device", "launcher"})
"""The named axes that make no pairs: the first two are equal in a run, and launchers have a comparison of their own."""


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
    batch = {batch_axis(axes.get("scaling")) for axes in cells}
    named = [axis for axis in CELL_AXES if AXES[axis].named and axis not in NOT_COMPARED]
    named = [axis for axis in named if not axis.endswith("batch_size") or axis in batch]
    options = dict.fromkeys(name for axes in cells for name in options_of(axes))
    return [axis for axis in (*named, *options) if len({_key(axis_value(axis, axes)) for axes in cells}) > 1]


def axis_value(axis: str, axes: Axes) -> object:
    """Return a cell's value on an axis or option, None if unset."""
    return (options_of(axes) if "." in axis else axes).get(axis)


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
        return axes["strategy"] != BASE_STRATEGY and axes["devices"] != 1
    if axis.endswith("batch_size"):
        return axis == batch_axis(axes.get("scaling"))
    return "." not in axis or axis in options_of(axes) or axis_value(axis, axes) is not None


def _held_fixed(axis: str, axes: Axes) -> str:
    """Return what cells that are compared along the axis have in common, as text."""
    follow = {axis, "options", *(name for name in CELL_AXES if axis in AXES[name].follows)}
    if axis == "devices":
        follow |= {*BATCHES} - {batch_axis(axes.get("scaling"))}
    options = {
        name: value
        for name, value in fixed_options(axes).items()
        if name != axis and not (axis == "strategy" and is_own_option(axes, name))
    }
    fixed = {name: _key(axes.get(name)) for name in CELL_AXES if name not in follow}
    return json.dumps([fixed, options], sort_keys=True, default=str)


def _key(value: object) -> Hashable:
    """Return a number, a text or a missing value as such, and anything else as text."""
    return value if isinstance(value, bool | int | float | str | None) else json.dumps(value, default=str)


def _order(axis: str, value: object, placements: Sequence[str]) -> tuple[object, ...]:
    """Return a sort key: none or an option's usual value, numbers, texts; strategies and precisions by their tables.

    Variants are equal: they stay in the order of the cells, which is to be that of the experiment file.
    """
    if axis == "strategy":
        return (0, strategy_order(str(value)))
    if axis == "variant":
        return (0,)
    known: Sequence[object] = {"device_ids": placements, "precision": PRECISIONS}.get(axis, ())
    if value in known:
        return (0, known.index(value))
    if value is None or value == "none":
        return (0,)
    if isinstance(value, bool | int | float):
        return (1, value)
    return (2, natural(value_text(value)))


def natural(value: object) -> object:
    """Return a sort key that puts resnet8 before resnet14; anything but text is returned unchanged."""
    if not isinstance(value, str):
        return value
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"([0-9]+)", value)]
