"""The experiment file as a strict, frozen value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from harness.config import sections
from harness.config.axes import SHARED_SECTIONS, Filter, LauncherName, options_in
from harness.config.builtin_workloads import BUILTIN_WORKLOADS, emulates_compute
from harness.config.doctor_checks import FINDINGS_OF
from harness.config.problems import Conflict, describe_errors, raise_conflicts
from harness.config.published import Published
from harness.config.strategy_traits import BUILTIN_TRAITS, Strict
from harness.config.values import (
    SECTION,
    Axis,
    FilePath,
    Name,
    Options,
    PlainValue,
    Seed,
    Text,
    absolute_folders,
    as_axis,
    as_tuple,
    one_of,
    problems_of,
)

DeviceRequest = Literal["auto", "cpu", "cuda"]
MOST_PUBLISHED = 1000


SGD: Mapping[str, PlainValue] = {"name": "SGD", "lr": 0.1, "momentum": 0.9}


class Experiment(Strict):
    """A validated experiment file, defaults included; made by ``harness.config.load``."""

    name: Name
    workload: Annotated[str, BeforeValidator(one_of(BUILTIN_WORKLOADS, or_own=True))] = "image_classification"
    grid: sections.Grid | None = None
    cells: Annotated[tuple[sections.Grid, ...], BeforeValidator(as_tuple)] = ()
    exclude: Annotated[tuple[Filter, ...], BeforeValidator(as_tuple)] = ()
    strategy_options: sections.StrategyOptions = sections.StrategyOptions()
    workload_options: Options = Field(default_factory=dict)
    variants: dict[Name, FilePath] = Field(default_factory=dict)
    optimizer: Options = Field(default_factory=lambda: dict(SGD))
    schedule: Options = Field(default_factory=dict)
    training: sections.TrainingOptions = sections.TrainingOptions()
    loader: sections.Loader = sections.Loader()
    env: Options = Field(default_factory=dict)
    effort: sections.Effort = "normal"
    throughput: sections.Throughput | None = sections.Throughput()
    convergence: sections.Convergence | None = None
    checkpoint: sections.Checkpoint | None = None
    published: Annotated[tuple[Published, ...], BeforeValidator(as_tuple), Field(max_length=MOST_PUBLISHED)] = ()
    improve: sections.Improve | None = None
    limits: sections.Limits = sections.Limits()
    cost: sections.Cost | None = None
    hardware: sections.Hardware = sections.Hardware()
    cluster: sections.GrowingCluster | None = None
    device: DeviceRequest = "auto"
    launcher: Axis[LauncherName] = ("ray",)
    oversubscribe: bool = False
    equivalence: bool = True
    preflight: bool = True
    allow: Annotated[tuple[Annotated[Text, BeforeValidator(one_of(FINDINGS_OF))], ...], BeforeValidator(as_axis)] = ()
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _with_effort(cls, given: object) -> object:
        """Set what the effort means in the section throughput, unless the file gives it."""
        if not isinstance(given, dict):
            return given
        chosen, timed = sections.EFFORTS.get(str(given.get("effort")), {}), given.get("throughput", {})
        return {**given, "throughput": {**chosen, **timed}} if isinstance(timed, dict) and chosen else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = any("optimizer.name" in grid.options for grid in self.grids)
        # the default's rate and momentum are those of SGD, and were chosen for no other optimizer
        left_out = named and "optimizer" not in self.model_fields_set
        found = self.model_copy(update={"optimizer": {}}) if left_out else self
        raise_conflicts(found._conflicts())
        return found

    def _conflicts(self) -> Iterator[Conflict]:
        yield from self._section_conflicts()
        yield from self._unnamed("optimizer", self.optimizer, "a class of torch.optim such as SGD")
        yield from self._unnamed("schedule", self.schedule, "a class of torch.optim.lr_scheduler such as StepLR")
        yield from self._variant_conflicts()
        yield from self._batch_conflicts()
        yield from self._length_conflicts()
        yield from self._unknown_names()
        yield from self._dotted_conflicts()
        yield from self._variable_conflicts()

    def _section_conflicts(self) -> Iterator[Conflict]:
        """Check which sections are there together."""
        if self.grid is None and not self.cells:
            text = "give a grid, or a list of cells, or both: there is nothing to measure"
            yield Conflict(text, ("grid", "cells"))
        if self.throughput is None and self.convergence is None:
            text = "throughput and convergence are both off: there is nothing to measure"
            yield Conflict(text, ("throughput", "convergence"))
        for text, section in self.against_improving if self.improve else ():
            if section != "limits":  # which recorded runs may have
                yield Conflict(f"improve: {text}", ("improve", section))
        if self.checkpoint and self.convergence is None:
            text = "checkpoint: needs a convergence section; only its trials have epochs to resume from"
            yield Conflict(text, ("checkpoint", "convergence"))
        if self.limits.cost and self.cost is None:
            text = "limits.cost: needs the price of a device, as cost: {per_device_hour: 2.5, currency: USD}"
            yield Conflict(text, ("limits", "cost"))

    def _unnamed(self, section: str, options: Options, what: str) -> Iterator[Conflict]:
        """Check that each grid with options of the section, which it may have beside it, also has their class."""
        own = [[key for key in grid.options if key.startswith(f"{section}.")] for grid in self.grids]
        needed = [keys for keys in own if section == "optimizer" or options or keys]
        if "name" not in options and any(f"{section}.name" not in keys for keys in needed):
            yield Conflict(f"{section}: needs a name, {what}; or the axis {section}.name in each grid", (section,))

    @property
    def grids(self) -> tuple[sections.Grid, ...]:
        """Every grid of the file."""
        return tuple(self.placed_grids.values())

    @property
    def placed_grids(self) -> dict[str, sections.Grid]:
        """Every grid by its place in the file."""
        cells = {f"cells[{number}]": grid for number, grid in enumerate(self.cells)}
        return {"grid": self.grid, **cells} if self.grid else cells

    @property
    def against_improving(self) -> Iterator[tuple[str, str]]:
        """Why no option of this experiment can be tried after its run, each reason with its section."""
        if self.throughput is None:
            yield "needs a throughput section; options are compared by their throughput", "throughput"
        if self.variants:
            yield "not together with variants; improve one version of your code", "variants"
        if self.limits.cost is not None or self.limits.device_hours is not None:
            yield "not together with limits.cost or limits.device_hours; its own time is its limit", "limits"

    @property
    def trains_at_unknown_batches(self) -> bool:
        """Whether the batch of trainings follows from a search, of which each cell may have another result."""
        unknown = any(grid.seeks_max and not grid.knows_a_batch for grid in self.grids)
        return unknown and self.convergence is not None and not self.convergence.names_batch

    @property
    def seeks_batches(self) -> bool:
        """Whether a grid has the largest batch of a device, ``max``."""
        return any(grid.seeks_max for grid in self.grids)

    @property
    def placements(self) -> tuple[str, ...]:
        """The numbers of GPUs that the grids name, each as text, '6,7', in the order of the file."""
        named = [ids for grid in self.grids for ids in grid.device_ids or ()]
        return tuple(dict.fromkeys(",".join(map(str, ids)) for ids in named))

    def _variant_conflicts(self) -> Iterator[Conflict]:
        if self.variants and not self.own_modules:
            own = "a workload or a strategy of your own, package.module:ClassName"
            keys = ("variants", "workload", "grid", "cells")
            yield Conflict(f"variants: needs {own}, of which they are code", keys)
        if len(self.variants) == 1:
            text = f"variants: got {', '.join(self.variants)} alone; allowed: at least two, to compare"
            yield Conflict(text, ("variants",))

    def _batch_conflicts(self) -> Iterator[Conflict]:
        """Check that micro-batches are automatic where a grid has both batches, and only there."""
        for grid in self.grids:
            given = as_axis(grid.options.get(sections.ACCUMULATION, ()))
            both = grid.batches_of_devices and grid.global_batch_size is not None
            if both and given != (sections.AUTO,):
                yield Conflict(f"grid: {sections.ONE_BATCH}", ("grid", "cells", "training"))
            if not both and sections.AUTO in given:
                text = "training.accumulation: auto needs both per_device_batch_size and global_batch_size"
                yield Conflict(text, ("grid", "cells", "training"))
        if self.seeks_batches and self.variants:
            text = "per_device_batch_size: max not together with variants; find the batch of one version"
            yield Conflict(text, ("grid", "cells", "variants"))

    def _length_conflicts(self) -> Iterator[Conflict]:
        """Check how long a training is: a workload's has epochs."""
        if settings := self.convergence:
            if settings.epochs is None:
                yield Conflict("convergence.epochs: is missing", ("convergence",))
            for name in ("steps", "seconds"):
                if getattr(settings, name) is not None:
                    text = f"convergence.{name}: is the length of a script's or a loop's training; give epochs"
                    yield Conflict(text, ("convergence",))

    def _unknown_names(self) -> Iterator[Conflict]:
        """Check the names of models and data against those of a built-in workload."""
        if builtin := BUILTIN_WORKLOADS.get(self.workload):
            for place, grid in self.placed_grids.items():
                for axis, problem in builtin.unknown(grid.data or (), grid.model or ()):
                    yield Conflict(f"{place}.{axis}: {problem}", ("workload",))

    def _dotted_conflicts(self) -> Iterator[Conflict]:
        """Check a grid's dotted options, such as ``loader.workers``, together with the rest of their section."""
        strategies: dict[str, Strict] = {name: getattr(self.strategy_options, name) for name in BUILTIN_TRAITS}
        by_name: dict[str, Strict] = {"loader": self.loader, "training": self.training, **strategies}
        for grid in self.grids:
            for name, section in by_name.items():
                try:
                    own = options_in(grid.options, name)
                    if as_axis(grid.options.get(sections.ACCUMULATION)) == (sections.AUTO,) and name == "training":
                        del own["accumulation"]
                    type(section).model_validate({**section.model_dump(), **own})
                except ValidationError as error:
                    keys = ("strategy_options" if name in strategies else name,)
                    for problem in describe_errors(error, type(section)):
                        yield Conflict(f"grid, {name}.{problem}", keys)

    def _variable_conflicts(self) -> Iterator[Conflict]:
        """Check the environment variables of the section and of the grids."""
        own = {f"grid, {SECTION}": {k: v for grid in self.grids for k, v in options_in(grid.options, SECTION).items()}}
        for place, options in {SECTION: self.env, **own}.items():
            for problem in problems_of(place, options):
                yield Conflict(problem, (SECTION,))

    @field_validator("workload_options")
    @classmethod
    def _folders(cls, options: Options, info: ValidationInfo) -> Options:
        return absolute_folders(options, "data_folder", info)

    @property
    def own_workload(self) -> bool:
        """Whether the workload is the user's own class."""
        return self.workload not in BUILTIN_WORKLOADS

    @property
    def emulated_compute(self) -> bool:
        """Whether the layers of its workload wait instead of computing."""
        return emulates_compute(self.workload)

    @property
    def own_strategies(self) -> tuple[str, ...]:
        """The user's own strategies, as ``package.module:ClassName``."""
        names = dict.fromkeys(name for grid in self.grids for name in grid.strategy)
        return tuple(name for name in names if name not in BUILTIN_TRAITS)

    @property
    def own_modules(self) -> tuple[str, ...]:
        """The modules of the user's own workload and strategies, each once; they are found beside the experiment file.

        With variants they are found in the folder of each instead.
        """
        names = [*([self.workload] if self.own_workload else []), *self.own_strategies]
        return tuple(dict.fromkeys(name.partition(":")[0] for name in names))

    @property
    def programs(self) -> tuple[str, ...]:
        """The files of the user that are executed as they are."""
        return ()

    @property
    def explains(self) -> bool:
        """Whether the parts of the waterfall are measured beside each cell."""
        return self.throughput is not None and self.throughput.explain

    def option_axes(self) -> dict[str, tuple[PlainValue, ...]]:
        """Return every option of the sections beside the grid as an axis: ``optimizer.lr`` -> its values."""
        given = self.model_dump(include={*SHARED_SECTIONS.values(), "strategy_options"})
        by_section = {name: given[attribute] for name, attribute in SHARED_SECTIONS.items()} | given["strategy_options"]
        return {
            f"{section}.{option}": as_axis(value)
            for section, options in by_section.items()
            for option, value in options.items()
        }
