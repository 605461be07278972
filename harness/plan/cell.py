"""A cell, one point of the grid: a frozen value whose identity is its content; and its placement."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from harness.config.axes import LATER, SHARED_SECTIONS
from harness.config.builtin_workloads import emulates_compute
from harness.config.strategy_traits import BUILTIN_TRAITS, StrategyTraits
from harness.config.values import PlainValue

Options = Mapping[str, PlainValue]
Scaling = Literal["weak", "strong"]
MOST_MICRO_BATCH = "most_micro_batch"
"""The option of a training whose micro-batches follow from the devices (accumulation: auto); in no file."""
LARGER = 4
"""The most micro-batches, over the least that a limit allows."""
MEASURES = 4
"""Raised when a cell of the same content measures something else; a run is resumed by an equal number only."""


@dataclass(frozen=True)
class Cell:
    """The configuration of a trial: model, data, strategy, devices, batch and options.

    ``per_device_batch_size`` is None if the global batch does not divide by the devices (strong scaling); such a cell
    is skipped with a reason, never changed. ``device_ids``: numbers of the node's GPUs; empty if any will do.
    ``variant``: the version of the user's code, by name, and ``code`` the hash of its files; None without variants. Of
    a script ``code`` is that of its arguments before values are put in, and of what a step is.
    ``uneven``: a cell whose global batch does not divide trains all the same, with unequal shares; None for others.
    ``own_traits``: the traits of a strategy of the user's own, which the table of traits lacks; no part of the
    identity, since the strategy's name is.
    """

    workload: str
    data: str | None
    model: str | None
    strategy: str
    device: str
    devices: int
    nodes: int
    scaling: Scaling
    per_device_batch_size: int | None
    global_batch_size: int
    precision: str = "fp32"
    compile: bool = False
    oversubscribed: bool = False
    launcher: str = "ray"
    device_ids: tuple[int, ...] = ()
    strategy_options: Options = field(default_factory=dict)
    workload_options: Options = field(default_factory=dict)
    optimizer: Options = field(default_factory=dict)
    schedule: Options = field(default_factory=dict)
    training: Options = field(default_factory=dict)
    loader: Options = field(default_factory=dict)
    variant: str | None = None
    code: str | None = None
    uneven: bool | None = None
    compile_mode: str = "default"
    activation_checkpointing: str = "none"
    env: Options = field(default_factory=dict)
    own_traits: StrategyTraits | None = field(default=None, compare=False)

    @cached_property
    def id(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the content, defaults included except those of OMITTED."""
        content = {name: getattr(self, name) for name in CONTENT}  # asdict() would copy every value
        text = ENCODER.encode({name: value for name, value in content.items() if OMITTED.get(name, UNSET) != value})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def options(self) -> dict[str, PlainValue]:
        """The options by axis name: ``{'optimizer.lr': 0.1, 'ddp.bucket_cap_mb': 25, ...}``."""
        shared: dict[str, Options] = {name: getattr(self, field_name) for name, field_name in SHARED_SECTIONS.items()}
        sections = {self.strategy: self.strategy_options, **shared}
        return {f"{name}.{key}": value for name, options in sections.items() for key, value in options.items()}

    @property
    def traits(self) -> StrategyTraits:
        """The traits of the cell's strategy."""
        return self.own_traits or BUILTIN_TRAITS[self.strategy]

    @property
    def emulated(self) -> bool:
        """Whether the strategy, as dp on CPU, or the computing is emulated: good for equivalence, not for speed."""
        return self.emulated_compute or (self.traits.emulated_on_cpu and self.device == "cpu")

    @property
    def emulated_compute(self) -> bool:
        """Whether the layers of its workload wait instead of computing."""
        return emulates_compute(self.workload)

    @property
    def backend(self) -> str:
        """The backend of its processes' collectives as the file asks for it: auto, nccl or gloo."""
        own = "gloo" if self.traits.own_ranks else "auto"  # a script connects its ranks itself: here are no tensors
        return str(self.strategy_options.get("backend", own))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches into which each rank's share of a step is split."""
        return int_option(self.training, "accumulation", 1)

    @property
    def lr_factor(self) -> float:
        """The factor on the optimizer's learning rate for this cell's global batch."""
        scaling = self.training.get("lr_scaling", "none")
        if scaling == "none":
            return 1.0
        base = self.training["lr_base_batch_size"]
        assert isinstance(base, int | float)
        k = self.global_batch_size / base
        return k if scaling == "linear" else math.sqrt(k)

    @property
    def eager(self) -> Cell:
        """The same cell without compilation."""
        return replace(self, compile=False, compile_mode="default")

    def axis(self, name: str) -> PlainValue:
        """Return the cell's value on an axis, named as in the experiment file; None if it has no such option."""
        if "." in name:
            return self.options.get(name)
        value: PlainValue = getattr(self, name)
        return value

    @property
    def workload_key(self) -> tuple[str, ...]:
        """The key of cells that share one examination: variant, strategy, data, model, workload options, named GPUs.

        Batch and device count do not matter to it; named GPUs do, since copies may fail between some pairs only.
        """
        options = repr(sorted(self.workload_options.items()))
        which = str(self.device_ids or "")
        return (self.strategy, str(self.data), str(self.model), options, which, self.variant or "")

    @property
    def loader_key(self) -> tuple[str, ...]:
        """The key of cells that share the number of loader workers which the doctor finds to be needed."""
        return (*self.workload_key[1:4], self.variant or "")

    def at_global_batch_size(self, batch: int) -> Cell:
        """Return the same cell at a global batch size (strong scaling)."""
        share = share_of(batch, self.devices)
        cell = replace(self, scaling="strong", global_batch_size=batch, per_device_batch_size=share)
        return cell.with_micro_batches()

    def with_micro_batches(self) -> Cell:
        """Return the cell with the fewest micro-batches of at most MOST_MICRO_BATCH samples that divide its share.

        If only far smaller ones divide it, with a number that does not, which is no possible cell. A cell without that
        option has the number of the file.
        """
        if not (most := int_option(self.training, MOST_MICRO_BATCH, 0)):
            return self
        share = -(-self.global_batch_size // self.devices)
        least = -(-share // most)
        fewest = next((n for n in range(least, min(share, LARGER * least) + 1) if share % n == 0), least)
        return replace(self, training={**self.training, "accumulation": fewest})

    def matches(self, wanted: Mapping[str, PlainValue]) -> bool:
        """Return whether the cell has, on every named axis, the wanted value or one of the wanted values."""
        return all(is_wanted(values, self.axis(name)) for name, values in wanted.items())


CONTENT = tuple(each.name for each in fields(Cell) if each.compare)
"""The fields that make a cell's id."""
UNSET = object()
OMITTED: Mapping[str, object] = {**LATER, "env": {}}
"""The fields that are no part of an id if they have these values: they came when cells had ids."""
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


def int_option(options: Options, name: str, default: int) -> int:
    """Return an option that the validation of the file has made an integer, or left out (null)."""
    value = options.get(name)
    assert value is None or isinstance(value, int)
    return default if value is None else value


def share_of(global_batch_size: int, devices: int) -> int | None:
    """Return each device's part of a global batch; None if the batch does not divide by the devices."""
    return None if global_batch_size % devices else global_batch_size // devices


def format_gpu_ids(device_ids: tuple[int, ...]) -> str:
    """Return GPU numbers as text: '0,1'."""
    return ",".join(map(str, device_ids))


MOST_LISTED = 20
"""The most values of an axis that a message lists."""


def is_wanted(values: PlainValue, value: PlainValue) -> bool:
    """Return whether a value of an axis is the wanted one, or one of the wanted ones, in lists of any depth.

    So ``devices=[1,2]`` means 1 or 2, and ``device_ids=[0,1]`` the pair; true and false are no numbers.
    """
    if isinstance(value, tuple):
        value = list(value)
    if value == values and isinstance(value, bool) is isinstance(values, bool):
        return True
    return isinstance(values, list | tuple) and any(is_wanted(each, value) for each in values)


def why_none(cells: Iterable[Cell], wanted: Mapping[str, PlainValue]) -> str:
    """Return why no cell has the wanted values: the values that the cells have on the axes on which none matches."""
    reasons = []
    for name, values in wanted.items():
        known = dict.fromkeys(json.dumps(cell.axis(name)) for cell in cells)
        if not any(is_wanted(values, json.loads(value)) for value in known):
            listed = ", ".join(sorted(known, key=lambda text: (len(text), text))[:MOST_LISTED])
            reasons.append(f"{name}: got {json.dumps(values, default=str)}; its cells have {listed}")
    return "; ".join(reasons) or f"it has each of {json.dumps(wanted)}, but not in one cell"


@dataclass(frozen=True, order=True)
class Placement:
    """Workers, split evenly over nodes, each with its own devices.

    ``device_ids``: the GPUs of the first worker, then those of the second, and so on; empty if any GPUs will do.
    """

    nodes: int
    workers: int
    devices_per_worker: int
    device_ids: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.workers * self.devices_per_worker

    @property
    def workers_per_node(self) -> int:
        return self.workers // self.nodes

    @property
    def devices_per_node(self) -> int:
        return self.workers_per_node * self.devices_per_worker

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        which = f" on GPU {format_gpu_ids(self.device_ids)}" if self.device_ids else ""
        devices = f"{self.devices_per_worker} device{'s' * (self.devices_per_worker > 1)}"
        workers = f"1 worker with {devices}" if self.workers == 1 else f"{self.workers} workers with {devices} each"
        return f"{workers}{nodes}{which}"

    def holds(self, other: Placement) -> bool:
        """Return whether this has as many workers, and as many devices."""
        return self.workers >= other.workers and self.devices >= other.devices

    def ids_of(self, local_rank: int) -> tuple[int, ...]:
        """Return the numbers of this worker's GPUs on the node; empty if any GPUs will do."""
        first = local_rank * self.devices_per_worker
        return self.device_ids[first : first + self.devices_per_worker]


def place(cell: Cell) -> Placement:
    """Return the placement of a cell. Whether a machine can hold it is decided by plan/feasibility.py."""
    if cell.traits.one_process:
        return Placement(cell.nodes, workers=1, devices_per_worker=cell.devices, device_ids=cell.device_ids)
    return Placement(cell.nodes, workers=cell.devices, devices_per_worker=1, device_ids=cell.device_ids)
