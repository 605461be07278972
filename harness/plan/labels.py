"""Labels of cells: the strategy, the devices, and the axes and options in which the cells of a plan or a run differ.

For example ``ddp x2 · resnet14 · batch 64/device · bucket_cap_mb=25``. What all cells share is said once, as the
constants. A cell of a diagnostic trial may differ from all others; its label then names that value too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from harness.config.axes import AXES, CELL_AXES
from harness.plan.cell import Cell
from harness.plan.comparison import axes_of, is_own_option, options_of
from harness.plan.trial import Trial
from harness.system.sanitize import plain

Axes = Mapping[str, object]
"""A cell's value on each of CELL_AXES, as axes_of returns it, or a row of a table that has these columns."""
SEPARATOR = " · "
BATCH = "per_device_batch_size"
"""The place of the batch among the axes: the per-device one under weak scaling, the global one under strong scaling."""
SETTING_AXES = tuple(
    name
    for name in CELL_AXES
    if AXES[name].named and not AXES[name].placement and name not in ("strategy", "global_batch_size")
)
"""The axes that a label names if they vary; it always names the strategy and the devices."""
TAGS = sorted(name for name, axis in AXES.items() if axis.tag)
LONGEST = 40
"""The most characters of a value; a longer one is cut, and a digest makes it unique."""
_PLAIN = re.compile(r"[\w./:@%+-]+")


class Labels:
    """The labels of cells; ``cells`` are those whose differences count: a plan's, without its diagnostic trials."""

    def __init__(self, cells: Iterable[Axes]) -> None:
        cells = list(cells)
        values: dict[str, set[Hashable]] = {axis: set() for axis in SETTING_AXES}
        strategies = Counter(str(axes["strategy"]) for axes in cells)
        owners: dict[str, str | None] = {}
        holders: Counter[str] = Counter()
        for axes in cells:
            for axis in SETTING_AXES:
                values[axis].add(_key(_value(axes, axis)))
            for name, value in options_of(axes).items():
                values.setdefault(name, set()).add(_key(value))
                owners[name] = str(axes["strategy"]) if is_own_option(axes, name) else None
                holders[name] += 1
        for name, owner in owners.items():
            if holders[name] < (len(cells) if owner is None else strategies[owner]):
                values[name].add("")
        self._constant = {name: next(iter(known)) for name, known in values.items() if len(known) == 1}
        self._names = _short_names(owners)
        self._cells = cells

    @property
    def constants(self) -> str:
        """What all cells share, options and defaults aside: ``digits · resnet8 · batch 32/device · fp32``."""
        if not self._cells:
            return ""
        first = self._cells[0]
        shared = ((axis, _value(first, axis)) for axis in SETTING_AXES if axis in self._constant and axis != "device")
        return SEPARATOR.join(
            _axis_text(axis, value)
            for axis, value in shared
            if value is not None and not (AXES[axis].silent and value == AXES[axis].default)
        )

    def of(self, axes: Axes) -> str:
        """Return the label of a cell: 'ddp x2 · resnet14 · batch 64/device · bucket_cap_mb=25'."""
        return joined(*self.parts(axes))

    def parts(self, axes: Axes) -> tuple[str, str, str]:
        """Return the parts of a cell's label: 'ddp x2', 'resnet14 · batch 64/device', 'bucket_cap_mb=25'.

        Strategy and devices; the setting, which cells of several strategies can share; the options that only its
        strategy can have. The last two may be empty.
        """
        named = zip(SETTING_AXES, setting_of(axes), strict=True)
        setting = [_axis_text(axis, value) for axis, value in named if self._differs(axis, value)]
        own: list[str] = []
        for name, value in sorted(options_of(axes).items()):
            if self._differs(name, value):
                shown = _text(plain({name: value})[name])
                (own if is_own_option(axes, name) else setting).append(f"{self._names.get(name, name)}={shown}")
        return f"{strategy_text(axes)} x{devices_text(axes)}", joined(*setting), joined(*own)

    def of_cell(self, cell: Cell) -> str:
        """Return the label of a planned cell."""
        return self.of(axes_of(cell))

    def of_trial(self, trial: Trial) -> str:
        """Return the label of a planned trial: that of its cell, its block or seed, and its purpose."""
        repeat = f"seed {trial.seed}" if trial.kind == "convergence" else f"block {trial.block}"
        return joined(self.of_cell(trial.cell), repeat, trial.purpose)

    def _differs(self, name: str, value: object) -> bool:
        return self._constant.get(name) != _key(value)


def joined(*parts: str) -> str:
    """Return the parts of a label as one text, without the empty ones."""
    return SEPARATOR.join(part for part in parts if part)


def strategy_text(axes: Axes) -> str:
    """Return the strategy with what sets its measurements apart: 'dp (emulated)'."""
    tags = [tag for tag in TAGS if axes.get(tag)]
    return f"{axes['strategy']} ({', '.join(tags)})" if tags else str(axes["strategy"])


def devices_text(axes: Axes) -> str:
    """Return the number of devices, and their ids and the link between them if the file names ids.

    For example '2 (GPU 0,1: NV12)', or '16 on 2 nodes'.
    """
    ids, link, nodes = (axes.get(name) for name in ("device_ids", "link", "nodes"))
    if ids:
        joined = f": {link}" if link else ""
        return f"{axes['devices']} (GPU {ids}{joined})"
    return f"{axes['devices']} on {nodes} nodes" if nodes not in (None, 1) else str(axes["devices"])


def batch_text(axes: Axes) -> str:
    """Return 'batch 64/device' or 'global batch 128', whichever the scaling holds fixed."""
    if axes.get("scaling") == "strong":
        return f"global batch {axes.get('global_batch_size')}"
    return f"batch {axes.get(BATCH)}/device"


def setting_of(axes: Axes) -> tuple[object, ...]:
    """Return a cell's value on each of SETTING_AXES."""
    return tuple(_value(axes, axis) for axis in SETTING_AXES)


def _value(axes: Axes, axis: str) -> object:
    """Return the value on an axis; for the batch, the text of the size that the scaling holds fixed."""
    return batch_text(axes) if axis == BATCH else axes.get(axis)


def _axis_text(axis: str, value: object) -> str:
    if axis == BATCH:
        return str(value)
    if axis == "compile":
        return "compiled" if value else "eager"
    if axis == "activation_checkpointing":
        return "no " * (value == "none") + "activation checkpointing"
    if axis == "compile_mode":
        return f"{axis} {value}"
    if value is None:
        return f"no {axis}"
    return _text(value) if isinstance(value, str) else f"{axis}={_text(value)}"


def _short_names(owners: Mapping[str, str | None]) -> dict[str, str]:
    """Return the name of each option in a label: without its section if no other option, and no axis, is named so."""
    last = {name: name.removeprefix(f"{owner or name.partition('.')[0]}.") for name, owner in owners.items()}
    taken = Counter(last.values()) + Counter([*CELL_AXES, "name"])
    return {name: name if taken[short] > 1 else short for name, short in last.items()}


def _key(value: object) -> Hashable:
    """Return what equal values of one type have in common."""
    if value is None or isinstance(value, str | int | float):
        return type(value).__name__, value
    return json.dumps(value, sort_keys=True, default=str)


def _text(value: object) -> str:
    """Return a value as in a YAML file: text without quotes if it then reads as text; cut if it is long."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _reads_as_value(value):
        text = value
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 10]}...{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}"


def _reads_as_value(text: str) -> bool:
    """Return whether a text looks like a number, a flag or null."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
