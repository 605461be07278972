"""The experiment file as a strict, frozen value. Loading it probes, imports and downloads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from harness.config import yaml_source
from harness.config.axes import Filter
from harness.config.problems import describe_errors
from harness.config.sections import (
    Checkpoint,
    Convergence,
    Grid,
    LauncherName,
    Limits,
    Loader,
    StrategyOptions,
    Throughput,
    TrainingOptions,
)
from harness.config.strategy_traits import BUILTIN_TRAITS, Strict
from harness.config.values import (
    USER_CLASS,
    Axis,
    Options,
    PlainValue,
    Seed,
    absolute_folders,
    as_axis,
    as_tuple,
    check_name,
)
from harness.errors import ExperimentError, nearest

DeviceRequest = Literal["auto", "cpu", "cuda"]


class BuiltinWorkload(NamedTuple):
    """A built-in workload: ``module:ClassName``, and its data and model if the grid names none."""

    location: str
    data: str
    model: str


BUILTIN_WORKLOADS: Mapping[str, BuiltinWorkload] = {
    "image_classification": BuiltinWorkload(
        "harness.train.workloads.image_classification:ImageClassification", "digits", "resnet18"
    ),
    "conv_stack": BuiltinWorkload("harness.train.workloads.conv_stack:ConvStack", "digits", "small"),
    "mlp": BuiltinWorkload("harness.train.workloads.mlp:Mlp", "digits", "medium"),
    "padded_sequences": BuiltinWorkload("harness.train.workloads.padded_sequences:PaddedSequences", "stdlib", "small"),
    "language_model": BuiltinWorkload("harness.train.workloads.language_model:LanguageModel", "stdlib", "nano"),
}
"""The built-in workloads by name: a new one is its file and a line here. A user's class has its own defaults."""


def _workload(value: object) -> object:
    if isinstance(value, str) and value not in BUILTIN_WORKLOADS and not USER_CLASS.fullmatch(value):
        hint = nearest(value, BUILTIN_WORKLOADS)
        raise ValueError(f"got {value!r}; {hint}, or package.module:ClassName of your own")
    return value


def _sgd() -> Options:
    return {"name": "SGD", "lr": 0.1, "momentum": 0.9}


class Experiment(Strict):
    """A validated experiment file, defaults included; made by ``load_experiment``."""

    name: Annotated[str, BeforeValidator(check_name)]
    workload: Annotated[str, BeforeValidator(_workload)] = "image_classification"
    grid: Grid | None = None
    cells: Annotated[tuple[Grid, ...], BeforeValidator(as_tuple)] = ()
    exclude: Annotated[tuple[Filter, ...], BeforeValidator(as_tuple)] = ()
    strategy_options: StrategyOptions = StrategyOptions()
    workload_options: Options = Field(default_factory=dict)
    optimizer: Options = Field(default_factory=_sgd)
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
            raise ValueError("checkpoint: needs a convergence section; only its trials have epochs to resume from")
        if "name" not in self.optimizer:
            raise ValueError("optimizer: needs a name, a class of torch.optim such as SGD")
        self._check_dotted()
        if self.schedule and "name" not in self.schedule:
            raise ValueError("schedule: needs a name, a class of torch.optim.lr_scheduler")
        return self

    def _check_dotted(self) -> None:
        """Check a grid's dotted options, such as ``loader.workers``, together with the rest of their section."""
        strategies: dict[str, Strict] = {name: getattr(self.strategy_options, name) for name in BUILTIN_TRAITS}
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

    @field_validator("workload_options")
    @classmethod
    def _folders(cls, options: Options, info: ValidationInfo) -> Options:
        return absolute_folders(options, "data_folder", info)

    @property
    def own_workload(self) -> bool:
        """Whether the workload is the user's own class."""
        return self.workload not in BUILTIN_WORKLOADS

    @property
    def own_strategies(self) -> tuple[str, ...]:
        """The user's own strategies, as ``package.module:ClassName``."""
        grids = (*((self.grid,) if self.grid else ()), *self.cells)
        names = dict.fromkeys(name for grid in grids for name in grid.strategy)
        return tuple(name for name in names if name not in BUILTIN_TRAITS)

    @property
    def own_code(self) -> bool:
        """Whether a workload or a strategy is the user's own; its module is found beside the experiment file."""
        return self.own_workload or bool(self.own_strategies)

    @property
    def explains(self) -> bool:
        """Whether the parts of the waterfall are measured beside each cell."""
        return self.throughput is not None and self.throughput.explain

    def option_axes(self) -> dict[str, tuple[PlainValue, ...]]:
        """Return every option of the sections beside the grid as an axis: ``optimizer.lr`` -> its values."""
        sections: dict[str, Mapping[str, PlainValue]] = {
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
    """Return the experiment in a file; raise ExperimentError, which lists every problem with its place."""
    return parse_experiment(yaml_source.read_mapping(path), source=str(path), home=path.resolve().parent)


def parse_experiment(content: Mapping[str, object], *, source: str, home: Path | None = None) -> Experiment:
    """Return the experiment in a mapping; raise ExperimentError, whose message names ``source``.

    Relative paths are resolved against ``home``; without ``home`` they stay relative.
    """
    try:
        return Experiment.model_validate(dict(content), context={"home": home})
    except ValidationError as error:
        raise ExperimentError(source, describe_errors(error, Experiment)) from None
