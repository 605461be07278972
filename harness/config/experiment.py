"""The experiment file as a strict, frozen value that does nothing: it probes and downloads nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from harness.config import yaml_source
from harness.config.problems import describe_errors
from harness.config.sections import (
    Checkpoint,
    Convergence,
    Grid,
    LauncherName,
    Limits,
    Loader,
    StrategyOptions,
    Strict,
    Throughput,
    TrainingOptions,
)
from harness.config.values import Axis, Filter, Options, Seed, as_axis, as_tuple, check_name
from harness.errors import ExperimentError, nearest

DeviceRequest = Literal["auto", "cpu", "cuda"]

BUILTIN_WORKLOADS: Mapping[str, str] = {
    "image_classification": "harness.train.workloads.image_classification:ImageClassification",
    "conv_stack": "harness.train.workloads.conv_stack:ConvStack",
    "mlp": "harness.train.workloads.mlp:Mlp",
    "padded_sequences": "harness.train.workloads.padded_sequences:PaddedSequences",
    "language_model": "harness.train.workloads.language_model:LanguageModel",
}
BUILTIN_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "image_classification": {"data": "digits", "model": "resnet18"},
    "conv_stack": {"data": "digits", "model": "small"},
    "mlp": {"data": "digits", "model": "medium"},
    "padded_sequences": {"data": "stdlib", "model": "small"},
    "language_model": {"data": "stdlib", "model": "nano"},
}
"""What a built-in workload trains where the grid names no data or model; a user's own class has its own."""

DATA_AXIS = "workload.data_folder"
_USER_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _workload(value: object) -> object:
    if isinstance(value, str) and value not in BUILTIN_WORKLOADS and not _USER_CLASS.fullmatch(value):
        hint = nearest(value, BUILTIN_WORKLOADS)
        raise ValueError(f"got {value!r}; {hint}, or package.module:ClassName of your own")
    return value


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
    training: TrainingOptions = TrainingOptions()
    loader: Loader = Loader()
    throughput: Throughput | None = Throughput()
    convergence: Convergence | None = None
    checkpoint: Checkpoint | None = None
    limits: Limits = Limits()
    device: DeviceRequest = "auto"
    launcher: Axis[LauncherName] = ("ray",)
    oversubscribe: bool = False
    equivalence: bool = True
    preflight: bool = True
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.grid is None and not self.cells:
            raise ValueError("give a grid, or a list of cells, or both: there is nothing to measure")
        if self.throughput is None and self.convergence is None:
            raise ValueError("throughput and convergence are both off: there is nothing to measure")
        if self.checkpoint and self.convergence is None:
            raise ValueError("checkpoint: needs a convergence section; only its trials have epochs to go on from")
        if "name" not in self.optimizer:
            raise ValueError("optimizer: needs a name, a class of torch.optim such as SGD")
        self._check_dotted()
        if self.schedule and "name" not in self.schedule:
            raise ValueError("schedule: needs a name, a class of torch.optim.lr_scheduler")
        return self

    def _check_dotted(self) -> None:
        """Options written with a dot inside a grid keep to the rules of their section, together with what is there."""
        strategies: dict[str, Strict] = {
            name: getattr(self.strategy_options, name) for name in StrategyOptions.model_fields
        }
        sections: dict[str, Strict] = {"loader": self.loader, "training": self.training, **strategies}
        for grid in (*((self.grid,) if self.grid else ()), *self.cells):
            for name, section in sections.items():
                prefix = f"{name}."
                own = {key.removeprefix(prefix): v for key, v in grid.options.items() if key.startswith(prefix)}
                if not own:
                    continue
                try:
                    type(section).model_validate({**section.model_dump(), **own})
                except ValidationError as error:
                    problem = describe_errors(error, type(section))[0]
                    raise ValueError(f"grid, {name}.{problem}") from None

    @property
    def workload_class(self) -> str:
        """Where the workload's class is: ``package.module:ClassName``."""
        return BUILTIN_WORKLOADS.get(self.workload, self.workload)

    @property
    def own_workload(self) -> bool:
        """Whether the workload is the user's own."""
        return self.workload not in BUILTIN_WORKLOADS

    @property
    def explains(self) -> bool:
        """Whether what explains a cell is measured beside it."""
        return self.throughput is not None and self.throughput.explain

    def option_axes(self) -> dict[str, tuple[Any, ...]]:
        """Every option of the sections beside the grid as an axis: ``optimizer.lr`` -> its values."""
        sections: dict[str, Mapping[str, Any]] = {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "training": self.training.model_dump(),
            "workload": self.workload_options,
            "loader": self.loader.model_dump(),
            **self.strategy_options.model_dump(),
        }
        return {
            f"{section}.{option}": as_axis(value)
            for section, options in sections.items()
            for option, value in options.items()
        }


def load_experiment(path: Path) -> Experiment:
    """The experiment in a file; raises ExperimentError with every problem, each with its place."""
    experiment = parse_experiment(yaml_source.read_mapping(path), source=str(path))
    return _with_absolute_paths(experiment, path.resolve().parent)


def parse_experiment(content: Mapping[str, Any], *, source: str) -> Experiment:
    """The experiment in a mapping; raises ExperimentError. ``source`` is what its message calls it."""
    try:
        return Experiment.model_validate(dict(content))
    except ValidationError as error:
        raise ExperimentError(source, describe_errors(error, Experiment)) from None


def _with_absolute_paths(experiment: Experiment, home: Path) -> Experiment:
    """Paths are meant from the experiment file's folder; workers stand elsewhere."""

    def absolute(text: str) -> str:
        try:
            return str((home / Path(text).expanduser()).absolute())
        except RuntimeError:
            raise ExperimentError(str(home), [f"path: got {text!r}; there is no such user's home"]) from None

    def moved(grid: Grid) -> Grid:
        data = tuple(absolute(name) if "/" in name else name for name in grid.data or ())
        return grid.model_copy(update={"data": data or None, "options": folder_of(grid.options, DATA_AXIS)})

    def folder_of(options: Options, name: str) -> Options:
        folders = [absolute(f) if isinstance(f, str) else f for f in as_axis(options.get(name))]
        return {**options, name: folders if len(folders) > 1 else folders[0]} if name in options else options

    options = folder_of(experiment.workload_options, "data_folder")
    checkpoint = experiment.checkpoint
    if checkpoint and checkpoint.folder:
        checkpoint = checkpoint.model_copy(update={"folder": absolute(checkpoint.folder)})
    return experiment.model_copy(
        update={
            "checkpoint": checkpoint,
            "grid": experiment.grid and moved(experiment.grid),
            "cells": tuple(moved(grid) for grid in experiment.cells),
            "workload_options": options,
        }
    )
