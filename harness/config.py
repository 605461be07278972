"""The experiment file as a strict, frozen value that does nothing: it probes and downloads nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from harness import yaml_source
from harness.config_problems import describe
from harness.config_values import (
    Axis,
    Batch,
    Count,
    Filter,
    Options,
    Seconds,
    Seed,
    Text,
    as_axis,
    as_tuple,
    check_name,
    is_option_axis,
)
from harness.errors import ExperimentError, nearest

StrategyName = Literal["single", "dp", "ddp", "fsdp"]
PrecisionName = Literal["fp32", "tf32", "bf16"]
DeviceRequest = Literal["auto", "cpu", "cuda"]

BUILTIN_WORKLOADS: Mapping[str, str] = {
    "image_classification": "harness.workloads.image_classification:ImageClassification",
}
BUILTIN_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "image_classification": {"data": "digits", "model": "resnet18"},
}
"""What a built-in workload trains where the grid names no data or model; a user's own class has its own."""

DATA_AXIS = "workload.data_folder"
_USER_CLASS = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def _workload(value: object) -> object:
    if isinstance(value, str) and value not in BUILTIN_WORKLOADS and not _USER_CLASS.match(value):
        hint = nearest(value, BUILTIN_WORKLOADS)
        raise ValueError(f"got {value!r}; {hint}, or package.module:ClassName of your own")
    return value


class Strict(BaseModel):
    """Frozen; no key that is not known, no type that is not meant."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Grid(Strict):
    """Axes whose product is a set of cells. Keys such as ``optimizer.lr`` make any option an axis too."""

    data: Axis[Text] | None = None
    model: Axis[Text] | None = None
    strategy: Axis[StrategyName] = ("single",)
    devices: Axis[Count] = (1,)
    nodes: Axis[Count] | None = None
    per_device_batch_size: Axis[Batch] | None = None
    global_batch_size: Axis[Batch] | None = None
    precision: Axis[PrecisionName] = ("fp32",)
    compile: Axis[bool] = (False,)
    options: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any) -> Any:
        """Keys with a dot are options of a section; they move to ``options``."""
        if not isinstance(value, dict):
            return value
        # the section may be written as it is called beside the grid
        value = {str(key).replace("workload_options.", "workload.", 1): option for key, option in value.items()}
        dotted = {key: option for key, option in value.items() if is_option_axis(key)}
        plain = {key: option for key, option in value.items() if key not in dotted}
        return {**plain, "options": {**plain.get("options", {}), **dotted}} if dotted else plain

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.per_device_batch_size is None) == (self.global_batch_size is None):
            raise ValueError("give exactly one of per_device_batch_size (weak) and global_batch_size (strong)")
        return self


class NoOptions(Strict):
    """For strategies that have nothing to set."""


class DdpOptions(Strict):
    """DistributedDataParallel's own settings, with its defaults. A list is an axis."""

    bucket_cap_mb: Axis[Annotated[int, Field(ge=1, le=100_000)]] = (25,)
    gradient_as_bucket_view: Axis[bool] = (False,)
    static_graph: Axis[bool] = (False,)
    find_unused_parameters: Axis[bool] = (False,)
    sync_batch_norm: Axis[bool] = (False,)


class FsdpOptions(Strict):
    """fully_shard's own settings, with its defaults. A list is an axis."""

    reshard_after_forward: Axis[bool] = (True,)
    sync_batch_norm: Axis[bool] = (False,)


class StrategyOptions(Strict):
    """Options of one strategy each."""

    single: NoOptions = NoOptions()
    dp: NoOptions = NoOptions()
    ddp: DdpOptions = DdpOptions()
    fsdp: FsdpOptions = FsdpOptions()


class Loader(Strict):
    """How batches are fetched; the same for every strategy. A list is an axis."""

    workers: Axis[Annotated[int, Field(ge=0, le=256)]] = (0,)
    pin_memory: Axis[bool] = (True,)
    prefetch_factor: Axis[Annotated[int, Field(ge=1, le=1024)]] = (2,)


class Throughput(Strict):
    """How fast: warm-up steps, then windows of at least so many steps and seconds, in so many blocks."""

    blocks: Annotated[int, Field(ge=1, le=1000)] = 6
    warmup_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    windows: Annotated[int, Field(ge=1, le=1000)] = 3
    window_steps: Annotated[int, Field(ge=2, le=1_000_000)] = 50
    window_seconds: Annotated[float, Field(ge=0, le=86_400)] = 5.0


class Target(Strict):
    """When a training counts as done: a validation metric reaches a value."""

    metric: Text
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")
        return self


class Convergence(Strict):
    """How well: which cells, for how many epochs, from which seeds, towards what."""

    epochs: Annotated[int, Field(ge=1, le=100_000)]
    seeds: Axis[Seed] = (0, 1, 2)
    target: Target | None = None
    only: Filter = Field(default_factory=dict)
    global_batch_size: Batch | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: got {list(self.seeds)}; a seed stands twice")
        return self


class Limits(Strict):
    """Of the run (wall), of the time a trial may pass without a step (trial), of attempts at a lost one."""

    wall: Seconds | None = None
    trial: Seconds = 600.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 2


class Experiment(Strict):
    """A resolved experiment file. ``load`` is the way to get one."""

    name: Annotated[str, BeforeValidator(check_name)]
    workload: Annotated[str, BeforeValidator(_workload)] = "image_classification"
    grid: Grid | None = None
    cells: Annotated[tuple[Grid, ...], BeforeValidator(as_tuple)] = ()
    exclude: Annotated[tuple[Filter, ...], BeforeValidator(as_tuple)] = ()
    strategy_options: StrategyOptions = StrategyOptions()
    workload_options: Options = Field(default_factory=dict)
    optimizer: Options = Field(default_factory=lambda: {"name": "SGD", "lr": 0.1, "momentum": 0.9})
    schedule: Options = Field(default_factory=dict)
    loader: Loader = Loader()
    throughput: Throughput | None = Throughput()
    convergence: Convergence | None = None
    limits: Limits = Limits()
    device: DeviceRequest = "auto"
    oversubscribe: bool = False
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.grid is None and not self.cells:
            raise ValueError("give a grid, or a list of cells, or both: there is nothing to measure")
        if self.throughput is None and self.convergence is None:
            raise ValueError("throughput and convergence are both off: there is nothing to measure")
        if "name" not in self.optimizer:
            raise ValueError("optimizer: needs a name, a class of torch.optim such as SGD")
        self._check_dotted()
        if self.schedule and "name" not in self.schedule:
            raise ValueError("schedule: needs a name, a class of torch.optim.lr_scheduler")
        return self

    def _check_dotted(self) -> None:
        """Options written with a dot inside a grid keep to the rules of their section."""
        sections: dict[str, type[Strict]] = {
            "loader": Loader,
            **{name: type(getattr(self.strategy_options, name)) for name in StrategyOptions.model_fields},
        }
        for grid in (*((self.grid,) if self.grid else ()), *self.cells):
            for key, value in grid.options.items():
                section, _, option = key.partition(".")
                if section in sections:
                    try:
                        sections[section].model_validate({option: value})
                    except ValidationError as error:
                        problem = describe(error, sections[section])[0]
                        raise ValueError(f"grid, {section}.{problem}") from None

    @property
    def workload_class(self) -> str:
        """Where the workload's class is: ``package.module:ClassName``."""
        return BUILTIN_WORKLOADS.get(self.workload, self.workload)

    @property
    def own_workload(self) -> bool:
        """Whether the workload is the user's own."""
        return self.workload not in BUILTIN_WORKLOADS

    def option_axes(self) -> dict[str, tuple[Any, ...]]:
        """Every option of the sections beside the grid as an axis: ``optimizer.lr`` -> its values."""
        sections: dict[str, Mapping[str, Any]] = {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "workload": self.workload_options,
            "loader": self.loader.model_dump(),
            **self.strategy_options.model_dump(),
        }
        return {
            f"{section}.{option}": as_axis(value)
            for section, options in sections.items()
            for option, value in options.items()
        }


def load(path: Path) -> Experiment:
    """The experiment in a file; raises ExperimentError with every problem, each with its place."""
    experiment = parse(yaml_source.read_mapping(path), source=str(path))
    return _with_absolute_paths(experiment, path.resolve().parent)


def parse(content: Mapping[str, Any], *, source: str) -> Experiment:
    """The experiment in a mapping; raises ExperimentError. ``source`` is what its message calls it."""
    try:
        return Experiment.model_validate(dict(content))
    except ValidationError as error:
        raise ExperimentError(source, describe(error, Experiment)) from None


def _with_absolute_paths(experiment: Experiment, home: Path) -> Experiment:
    """Paths of data are meant from the experiment file's folder; workers stand elsewhere."""

    def absolute(text: str) -> str:
        try:
            return str((home / Path(text).expanduser()).absolute())
        except RuntimeError:
            raise ExperimentError(str(home), [f"data: got {text!r}; there is no such user's home"]) from None

    def moved(grid: Grid) -> Grid:
        data = tuple(absolute(name) if "/" in name else name for name in grid.data or ())
        return grid.model_copy(update={"data": data or None, "options": folder_of(grid.options, DATA_AXIS)})

    def folder_of(options: Options, name: str) -> Options:
        folders = [absolute(f) if isinstance(f, str) else f for f in as_axis(options.get(name))]
        return {**options, name: folders if len(folders) > 1 else folders[0]} if name in options else options

    options = folder_of(experiment.workload_options, "data_folder")
    return experiment.model_copy(
        update={
            "grid": experiment.grid and moved(experiment.grid),
            "cells": tuple(moved(grid) for grid in experiment.cells),
            "workload_options": options,
        }
    )
