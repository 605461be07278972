"""A cell, one point of the grid: a frozen value whose identity is its content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from harness.config.strategy_traits import BUILTIN_TRAITS, StrategyTraits
from harness.config.values import PlainValue

Options = Mapping[str, PlainValue]
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True)
class Cell:
    """The configuration of a trial: model, data, strategy, devices, batch and options.

    ``per_device_batch_size`` is None if the global batch does not divide by the devices (strong scaling); such a cell
    is skipped with a reason, never changed. ``device_ids``: numbers of the node's GPUs; empty if any will do.
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
    oversubscribe: bool = False
    launcher: str = "ray"
    device_ids: tuple[int, ...] = ()
    strategy_options: Options = field(default_factory=dict)
    workload_options: Options = field(default_factory=dict)
    optimizer: Options = field(default_factory=dict)
    schedule: Options = field(default_factory=dict)
    training: Options = field(default_factory=dict)
    loader: Options = field(default_factory=dict)
    own_traits: StrategyTraits | None = field(default=None, compare=False)

    @cached_property
    def id(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the content, defaults included."""
        # dataclasses.asdict() would copy every value
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        content = json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def options(self) -> dict[str, PlainValue]:
        """The options by axis name: ``{'optimizer.lr': 0.1, 'ddp.bucket_cap_mb': 25, ...}``."""
        sections = {
            self.strategy: self.strategy_options,
            "workload": self.workload_options,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "training": self.training,
            "loader": self.loader,
        }
        return {f"{name}.{key}": value for name, options in sections.items() for key, value in options.items()}

    @property
    def traits(self) -> StrategyTraits:
        """The traits of the cell's strategy."""
        return self.own_traits or BUILTIN_TRAITS[self.strategy]

    @property
    def emulated(self) -> bool:
        """Whether the strategy is emulated on CPU, as dp is: good for equivalence, not for speed."""
        return self.traits.emulated_on_cpu and self.device == "cpu"

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

    def axis(self, name: str) -> PlainValue:
        """Return the cell's value on an axis, named as in the experiment file; None if it has no such option."""
        value: PlainValue = self.options.get(name) if "." in name else getattr(self, name)
        return value

    @property
    def workload_key(self) -> tuple[str, ...]:
        """The key of cells that share one examination: strategy, data, model, workload options and named GPUs.

        Batch and device count do not matter to it; named GPUs do, since copies may fail between some pairs only.
        """
        options = repr(sorted(self.workload_options.items()))
        return (self.strategy, str(self.data), str(self.model), options, str(self.device_ids or ""))

    def at_global_batch_size(self, batch: int) -> Cell:
        """Return the same cell at a global batch size (strong scaling)."""
        share = share_of(batch, self.devices)
        return replace(self, scaling="strong", global_batch_size=batch, per_device_batch_size=share)

    def matches(self, wanted: Mapping[str, PlainValue]) -> bool:
        """Return whether the cell has, on every named axis, the wanted value or one of the wanted values."""
        return all(_wants(values, self.axis(name)) for name, values in wanted.items())

    @property
    def label(self) -> str:
        """A short name for display: ``ddp x2 · resnet18 · batch 32/device · fp32``."""
        batch = (
            f"batch {self.per_device_batch_size}/device"
            if self.scaling == "weak"
            else f"global batch {self.global_batch_size}"
        )
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        which = f" on GPU {format_gpu_ids(self.device_ids)}" if self.device_ids else ""
        launcher = self.launcher if self.launcher != "ray" else None
        parts = [f"{self.strategy} x{self.devices}{nodes}{which}", self.model, batch, self.precision, launcher]
        return " · ".join(part for part in parts if part)


def int_option(options: Options, name: str, default: int) -> int:
    """Return an option that the validation of the file has made an integer."""
    value = options.get(name, default)
    assert isinstance(value, int)
    return value


def share_of(global_batch_size: int, devices: int) -> int | None:
    """Return each device's part of a global batch; None if the batch does not divide by the devices."""
    return None if global_batch_size % devices else global_batch_size // devices


def format_gpu_ids(device_ids: tuple[int, ...]) -> str:
    """Return GPU numbers as text: '0,1'."""
    return ",".join(map(str, device_ids))


def _wants(values: PlainValue, value: PlainValue) -> bool:
    if isinstance(value, tuple):
        value = list(value)
    return bool(value == values) or (isinstance(values, list | tuple) and value in values)
