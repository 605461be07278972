"""An experiment on training code as it is, a script or a Ray Train function: its arguments, its axes, its steps."""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from harness.config.axes import LATER, OWN_PRECISION, PLAIN_AXES, OwnPrecision, PrecisionName, options_in
from harness.config.experiment import Experiment
from harness.config.problems import Conflict, raise_conflicts
from harness.config.sections import Convergence, Grid, Throughput
from harness.config.strategy_traits import StrategyTraits, Strict
from harness.config.values import (
    SECTION,
    USER_CLASS,
    Axis,
    FilePath,
    Name,
    Options,
    PlainValue,
    Text,
    as_axis,
    as_tuple,
    leaves,
)
from harness.errors import nearest

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
GIVEN = ("devices", "nodes", "device", "per_device_batch_size", "global_batch_size", "strategy", "model", "data")
GIVEN_PLACEHOLDERS = (*GIVEN, *PLAIN_AXES, "seed", "folder", "local_rank")
"""The placeholders that every script has; ``folder``: the trial's folder, in which the script runs.

``local_rank``: what torch.distributed.launch passes as --local-rank.
"""
OPERATORS: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
SCRIPT_TRAITS = StrategyTraits(own_program=True, own_ranks=True, marker="o", summary="the script decides")
LOOP_TRAITS = StrategyTraits(own_program=True, marker="o", summary="the loop decides")
INGEST_TRAITS = StrategyTraits(own_program=True, trains=False, marker="o", summary="the loop's batches alone")
"""The traits of whatever strategy a script uses, or a Ray Train function: one process a device."""
MODE, MODES = "mode", ("train", "ingest")
"""The axis of a loop with datasets, and its values: ingest consumes its batches without training."""
OF_SCRIPTS, OF_LOOPS = ("arguments", "one_rank", "keep"), ("config", "datasets")
"""The keys that only the one or the other has."""
EXAMINED = {
    "warmup_steps": 5,
    "warmup_rounds": 2,
    "warmup_seconds": 0.0,
    "windows": 1,
    "window_steps": 5,
    "window_seconds": 0.0,
}
"""The steps of an examination."""
UNUSED_SECTIONS = {
    "workload": "the script has its own model and data",
    "optimizer": "the script has its own",
    "schedule": "the script has its own",
    "training": "the script has its own loop",
    "loader": "the script has its own",
    "strategy_options": "the script has its own strategy",
    "checkpoint": "the script writes its own",
    "improve": "its options are the script's own; make them axes of the grid",
    "variants": "not possible for scripts; name the script's versions by an argument",
    "oversubscribe": "each rank of a script has a device of its own",
}
"""The sections of a file that a script has no use for, each with the reason."""
OF_WORKLOADS = {
    "epochs": "the script trains to its own end; give steps or seconds to end it before",
    "train_metrics": "the script reports its own",
    "uneven": "the script has its own batches",
}
"""The options of the section convergence that a script has no use for, each with the reason."""
OTHER_NAMES = {"eval": "val", "valid": "val", "validation": "val", "training": "train"}
"""Other beginnings of the names of metrics."""
REPORTED = "reported_"
"""How the columns begin of metrics that are not said to be of training or of validation."""
CURVE_METRICS = ("val_", REPORTED)
"""How the columns of metrics begin, beside those of training."""


def column_of(name: str) -> str:
    """Return the column of the table epochs for a metric that a script reports: val_accuracy for 'eval/acc'."""
    plain = re.sub(r"\W+", "_", name).strip("_").removeprefix(REPORTED)[:60].removesuffix("_epoch")
    if plain in ("lr", "learning_rate"):
        return "learning_rate"
    first, _, rest = plain.partition("_")
    first, rest = OTHER_NAMES.get(first, first), "accuracy" if rest == "acc" else rest
    known = first in ("train", "val") and rest not in ("", "s")  # train_s is the time
    return f"{first}_{rest}" if known else f"{REPORTED}{plain}"


class Step(Strict):
    """What a step of the script counts as.

    ``samples``: of one rank and optimizer step, a number or arithmetic over placeholders; without it those that the
    DataLoader delivers while gradients are enabled, in iterations with a backward pass. ``optimizer``: whose steps
    count, by the order of their first steps. ``pause``: "validation" leaves out the time from a batch without gradients
    to the next one with gradients.
    """

    samples: int | float | Text | None = None
    unit: Literal["samples", "tokens"] = "samples"
    optimizer: Annotated[int, Field(ge=0, le=100)] = 0
    pause: Literal["none", "validation"] = "none"


class ScriptGrid(Grid):
    """The axes of a script's cells: names that its arguments use, beside those that every grid has."""

    strategy: Axis[Text] = ("script",)
    precision: Axis[PrecisionName | OwnPrecision] = (OWN_PRECISION,)  # type: ignore[assignment]  # one more name

    @model_validator(mode="before")
    @classmethod
    def _own_axes(cls, value: object) -> object:
        """Move keys that are no axis of every grid to the options ``workload.<key>``.

        Axes of LATER with other values than their default too: only the program itself can have them.
        """
        if not isinstance(value, dict):
            return value
        known = {*cls.model_fields, SECTION}
        later = {key for key, default in LATER.items() if key in value and as_axis(value[key]) != (default,)}
        own = {key for key in value if str(key).isidentifier() and key not in known} | later
        return {f"workload.{key}" if key in own else key: option for key, option in value.items()}


def own_names(grid: Grid) -> list[str]:
    """Return the names of the axes that only the script has."""
    return [*options_in(grid.options, "workload")]


def check_function(value: object) -> object:
    if isinstance(value, str) and not USER_CLASS.fullmatch(value):
        raise ValueError(f"got {value[:80]!r}; allowed: package.module:function, beside the experiment file")
    return value


FunctionName = Annotated[Text, BeforeValidator(check_function)]


def split(value: object) -> object:
    """Return the arguments in a text, split as a shell does, and those in a list as texts."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if isinstance(value, list | tuple):
        return tuple(str(each) if isinstance(each, int | float) else each for each in value)
    return value


class ScriptExperiment(Experiment):
    """A validated experiment file with ``script: FILE``, or ``loop: package.module:function`` of Ray Train.

    ``arguments``: text that is split as a shell splits it, or a list; each ``{name}`` is replaced by the cell's value,
    and an argument that becomes empty is left out. ``one_rank``: whether one device has torchrun's variables (RANK and
    so on) too, or is ``python FILE``. ``keep``: the files that the script writes stay in the run folder. ``config``:
    the loop's argument; a text that is one ``{name}`` is the cell's value itself. ``datasets``: of Ray Data, for
    ``ray.train.get_dataset_shard``: a name and the function without arguments that returns each; with them the axis
    ``mode`` may be [train, ingest].
    """

    workload: str = ""
    script: FilePath | None = None
    loop: FunctionName | None = None
    datasets: dict[Name, FunctionName] = Field(default_factory=dict)
    config: Options = Field(default_factory=dict)
    arguments: Annotated[tuple[str, ...], BeforeValidator(split)] = ()
    step: Step = Step()
    one_rank: Literal["torchrun", "python"] = "torchrun"
    keep: bool | str = False
    grid: ScriptGrid | None = None
    cells: Annotated[tuple[ScriptGrid, ...], BeforeValidator(as_tuple)] = ()
    equivalence: bool = False
    preflight: bool = False

    @model_validator(mode="after")
    def _check_script(self) -> Self:
        raise_conflicts(self._script_conflicts())
        named = self._named_strategies() if self.loop else {}
        return self.model_copy(update={"workload": self.program, "convergence": self._with_column(), **named})

    def _with_column(self) -> Convergence | None:
        """Return the section convergence, whose target names a column."""
        if not (self.convergence and self.convergence.target):
            return self.convergence
        target = self.convergence.target
        target = target.model_copy(update={"metric": column_of(target.metric)})
        return self.convergence.model_copy(update={"target": target})

    def worded(self, text: str) -> str:
        """Return a text about the script; of a loop, with that word."""
        return text if self.script else re.sub(r"\bscript\b", "loop", text)

    def _length_conflicts(self) -> Iterator[Conflict]:
        """Check how long a training is, and that seeds differ in something."""
        if not (settings := self.convergence):
            return
        keys = ("convergence",)
        for name, why in OF_WORKLOADS.items():
            if getattr(settings, name) != type(settings).model_fields[name].default:
                text = f"convergence.{name}: has no meaning here: {self.worded(why)}; leave it out"
                yield Conflict(text, keys)
        if settings.steps is not None and settings.seconds is not None:
            yield Conflict("convergence: give steps or seconds, not both", keys)
        if len(settings.seeds) > 1 and "seed" not in self._used():
            place = "arguments" if self.script else "config"
            text = f"convergence.seeds: got {', '.join(map(str, settings.seeds))}, and {place} have no {{seed}}: all "
            text += "would train alike; pass it to the training, or set seeds: [0]"
            yield Conflict(text, (*keys, place))

    def _named_strategies(self) -> dict[str, object]:
        """Return the grids of a loop, whose strategy is called so unless they name another."""

        def named(grid: ScriptGrid) -> ScriptGrid:
            return grid if "strategy" in grid.model_fields_set else grid.model_copy(update={"strategy": ("loop",)})

        return {"grid": self.grid and named(self.grid), "cells": tuple(map(named, self.cells))}

    def _script_conflicts(self) -> Iterator[Conflict]:
        kind, other = ("script", "loop") if self.script else ("loop", "script")
        if self.script and self.loop:
            yield Conflict("give script or loop, not both", ("script", "loop"))
        unused = {name: self.worded(why) for name, why in UNUSED_SECTIONS.items()}
        unused |= dict.fromkeys(OF_LOOPS if self.script else OF_SCRIPTS, f"it belongs to {other}")
        for name, why in unused.items():
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) not in (default, self.program):
                yield Conflict(f"{name}: has no meaning beside {kind}: {why}; leave it out", (name,))
        if self.seeks_batches:
            text = f"per_device_batch_size: max is found for workloads; give numbers for a {kind}"
            yield Conflict(text, ("grid", "cells"))
        if self.loop and self.launcher != ("ray",):
            yield Conflict("launcher: a loop runs under Ray Train; allowed: ray", ("launcher",))
        if self.equivalence:
            yield Conflict(f"equivalence: cannot be checked of a {kind}; leave it out", ("equivalence",))
        for place, grid in self.placed_grids.items():
            yield from self._unlike_arguments(place, grid)

    def _unlike_arguments(self, place: str, grid: Grid) -> Iterator[Conflict]:
        """Check that arguments or config use each axis that only the script has, and no other names."""
        used, own = self._used(), {*self.workload_options, *own_names(grid)}
        for name in sorted(own & {*GIVEN_PLACEHOLDERS} - {*LATER}):
            yield Conflict(f"{place}.{name}: is set by harness; name the axis otherwise", (place,))
        for name in sorted(used & {"precision", "model", "data", "strategy"} - grid.model_fields_set):
            yield Conflict(f"arguments: {{{name}}} is used, and {place} has no {name}", ("arguments", place))
        known = {*GIVEN_PLACEHOLDERS, *own}
        for name in sorted(used - known):
            yield Conflict(f"arguments: {{{name}}} is no axis of {place}; {nearest(name, known)}", ("arguments", place))
        if MODE in own - used:
            yield from self._wrong_modes(place, grid)
        for name in sorted(own - used - {MODE}):
            hint = nearest(name, ({*ScriptGrid.model_fields} - {"options", "seeks_max"} | used) - own)
            text = f"{place}.{name}: unknown axis, and arguments do not use it as {{{name}}}; {hint}"
            yield Conflict(text, (place, "arguments"))
        yield from self._samples(grid)

    def _wrong_modes(self, place: str, grid: Grid) -> Iterator[Conflict]:
        """Check the axis mode, which is not the user's own."""
        if not self.datasets:
            yield Conflict(f"{place}.mode: belongs to a loop with datasets", (place, "datasets"))
        given = grid.options.get(f"workload.{MODE}", self.workload_options.get(MODE))
        if wrong := [value for value in as_axis(given) if value not in MODES]:
            yield Conflict(f"{place}.mode: got {wrong[:1]}; allowed: {', '.join(MODES)}", (place,))

    def _samples(self, grid: Grid) -> Iterator[Conflict]:
        """Check the arithmetic of step.samples for the first and the last value of each axis."""
        given: dict[str, PlainValue] = {name: getattr(grid, name, None) for name in GIVEN}
        options = options_in(grid.options, "workload")
        axes = {name: as_axis(value) for name, value in {**given, **self.workload_options, **options}.items()}
        for end in (0, -1) if self.step.samples is not None else ():
            values = {name: value[end] for name, value in axes.items()}
            batch = values["per_device_batch_size"] or values["global_batch_size"]
            try:
                evaluate(str(self.step.samples), {**values, "per_device_batch_size": batch, "global_batch_size": batch})
            except ValueError as error:
                yield Conflict(f"step.samples: {error}", ("step",))

    def _used(self) -> set[str]:
        """Return the placeholders that arguments, config and the step's samples use."""
        texts = [*self.arguments, *(str(leaf) for leaf in leaves([*self.config.values()])), str(self.step.samples)]
        return {found for text in texts for found in PLACEHOLDER.findall(text)}

    def throughput_of(self, purpose: str) -> Throughput:
        """Return the options of a trial's steps: few for an examination."""
        timed = self.throughput or Throughput()
        return timed.model_copy(update=EXAMINED) if purpose == "doctor" else timed

    def profiles(self, purpose: str, traits: StrategyTraits) -> bool:
        """Return whether steps after the windows of a trial are profiled: not of one that repeats a base."""
        return self.explains and traits.trains and purpose not in ("doctor", "twin", "threads")

    def traits_of(self, options: Mapping[str, PlainValue]) -> StrategyTraits:
        """Return the traits of a cell with these options of the script or loop."""
        if self.script:
            return SCRIPT_TRAITS
        return INGEST_TRAITS if options.get(MODE) == "ingest" and MODE not in self._used() else LOOP_TRAITS

    @property
    def program(self) -> str:
        """The name of the script's file, or of the loop."""
        return Path(self.script).name if self.script else str(self.loop)

    def config_of(self, values: Mapping[str, PlainValue]) -> dict[str, PlainValue]:
        """Return the loop's argument for a cell."""

        def filled(value: PlainValue) -> PlainValue:
            if isinstance(value, list | tuple):
                return [filled(each) for each in value]
            if not isinstance(value, str):
                return value
            whole = PLACEHOLDER.fullmatch(value)
            return values[whole[1]] if whole else PLACEHOLDER.sub(lambda m: _text(values[m[1]]), value)

        return {name: filled(value) for name, value in self.config.items()}

    def command(self, values: Mapping[str, PlainValue]) -> list[str]:
        """Return the arguments of a cell; ``values``: of its axes by name, those of the script's own among them."""
        filled = (PLACEHOLDER.sub(lambda m: _text(values[m[1]]), text) for text in self.arguments)
        return [text for text in filled if text]

    @property
    def command_code(self) -> str:
        """A hash of what makes the same values another command, or another step."""
        own = (self.name, self.arguments, self.config, self.step, self.one_rank)
        return hashlib.sha256(repr((*own, self.datasets) if self.datasets else own).encode()).hexdigest()[:12]

    def stated_samples(self, values: Mapping[str, PlainValue]) -> float | None:
        """Return the samples or tokens of one rank and step that the file states; None if it states none."""
        return None if self.step.samples is None else evaluate(str(self.step.samples), values)

    @property
    def programs(self) -> tuple[str, ...]:
        return (self.script,) if self.script else ()

    @property
    def own_workload(self) -> bool:
        return False

    @property
    def own_modules(self) -> tuple[str, ...]:
        names = [*([self.loop] if self.loop else []), *self.datasets.values()]
        return tuple(dict.fromkeys(name.partition(":")[0] for name in names))

    @property
    def own_strategies(self) -> tuple[str, ...]:
        return ()

    def option_axes(self) -> dict[str, tuple[PlainValue, ...]]:
        sections = {"workload": self.workload_options, SECTION: self.env}
        return {f"{name}.{key}": as_axis(value) for name, given in sections.items() for key, value in given.items()}


def _text(value: PlainValue) -> str:
    """Return a value as an argument: None is empty, true and false are Python's, a list is joined by commas."""
    if value is None:
        return ""
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def evaluate(expression: str, values: Mapping[str, PlainValue]) -> float:
    """Return the value of arithmetic over placeholders, such as ``{per_device_batch_size} * 40``; raise ValueError."""
    allowed = "allowed: numbers, placeholders such as {per_device_batch_size}, + - * / // and brackets"
    text = PLACEHOLDER.sub(lambda match: f"({_text(values.get(match[1]))})", expression)

    def value_of(node: ast.AST) -> float:
        if isinstance(node, ast.Expression):
            return value_of(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        raise ValueError

    try:
        found = float(value_of(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        raise ValueError(f"got {expression[:80]!r}; {allowed}") from None
    if not (math.isfinite(found) and found > 0):
        raise ValueError(f"got {expression[:80]!r}, which is {found:g}; it must be above 0")
    return found
