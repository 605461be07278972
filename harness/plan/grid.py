"""Expansion of an experiment into cells: products of axes, lists, exclusions, bases, published cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.config.axes import PLAIN_AXES, SHARED_SECTIONS
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import Experiment
from harness.config.published import Published
from harness.config.script import ScriptExperiment
from harness.config.sections import Grid
from harness.config.strategy_traits import BUILTIN_TRAITS, StrategyTraits
from harness.config.values import PlainValue, as_axis, leaves
from harness.errors import ExperimentError
from harness.plan.cell import MOST_MICRO_BATCH, Cell, Options, Scaling, share_of
from harness.plan.comparison import base_cells
from harness.plan.inventory import Machine
from harness.plan.rows import Json
from harness.system.user_code import CodeVersion

NAMED = 3
"""The most cells that an error names."""


def check_published(experiment: Experiment, asked: Sequence[Cell]) -> None:
    """Raise ExperimentError unless each published figure is of exactly one cell of the file that is to be measured."""
    problems = [
        problem for entry in enumerate(experiment.published) for problem in _problems(*entry, experiment, asked)
    ]
    if problems:
        raise ExperimentError("published", problems)


def _problems(number: int, entry: Published, experiment: Experiment, asked: Sequence[Cell]) -> Iterator[str]:
    place = f"published[{number}]"
    section = "convergence" if entry.level == "epochs" else "throughput"
    if getattr(experiment, section) is None:
        yield f"{place}.metric: {entry.metric} needs the section {section}, which is off"
        return
    cells = list(dict.fromkeys(_trained(experiment, asked) if section == "convergence" else asked))
    found = [cell for cell in cells if cell.matches(entry.cell)]
    if len(found) != 1:
        named = "; ".join(f"{cell.strategy} x{cell.devices}, batch {cell.global_batch_size}" for cell in found[:NAMED])
        some = f" ({named}{'; ...' if len(found) > NAMED else ''})" if found else ""
        yield (
            f"{place}.cell: got {entry.cell}, which {len(found)} of the {len(cells)} cells match{some}; allowed: axes "
            "of the grid, with values that exactly one cell has"
        )


def _trained(experiment: Experiment, asked: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells from which trainings are chosen, at their batch; which of them train depends on the machine."""
    settings = experiment.convergence
    assert settings is not None
    for cell in asked:
        if cell.matches(settings.only):
            batch = settings.global_batch_size
            yield cell.at_global_batch_size(batch) if batch else cell


TraitsByName = Mapping[str, StrategyTraits]
NO_TRAITS: TraitsByName = MappingProxyType({})


class OwnCode(NamedTuple):
    """The user's code in one variant: its version, and the traits of its strategies."""

    version: CodeVersion
    traits: TraitsByName


Variants = Mapping[str, OwnCode]
NO_VARIANTS: Variants = MappingProxyType({})
MAX_CELLS = 12_000
MAX_TRIALS = 30_000
MAX_VALUES = 1_000_000
MAX_COMPARISONS = 5_000_000
"""Limits of a plan: within them planning takes at most 2 s and 500 MB. 30,000 trials of 2 s take 17 hours."""


@dataclass(frozen=True)
class Cells:
    """The cells of an experiment: ``asked`` by the file, and ``added`` bases that the file does not name.

    ``unmatched``: the rules of ``exclude`` that no cell matches.
    """

    asked: tuple[Cell, ...]
    added: tuple[Cell, ...]
    unmatched: tuple[Mapping[str, PlainValue], ...] = ()


TAKEN = ("data", "model", "strategy", "device_ids", "launcher", "variant")
"""The axes that a cell takes unchanged beside the plain ones."""
GridPoint = Mapping[str, Any]
"""One value of each axis of a grid; None if the experiment leaves an axis to the planner or the workload."""


def expand(
    experiment: Experiment, machine: Machine, own_traits: TraitsByName = NO_TRAITS, variants: Variants = NO_VARIANTS
) -> Cells:
    """Return every cell once, in the order of the file; raise ExperimentError if none is left.

    ``own_traits``: the traits of the user's own strategies, by ``package.module:ClassName``. ``variants``: the code of
    each variant of the experiment, which has its own traits.
    """
    _check_size(experiment)
    cells = dict.fromkeys(
        cell for grid in experiment.grids for cell in _cells(grid, experiment, machine, own_traits, variants)
    )
    asked = tuple(cell for cell in cells if not any(map(cell.matches, experiment.exclude)))
    if not asked:
        raise ExperimentError("exclude", ["exclude leaves no cell of the grid: there is nothing to measure"])
    check_published(experiment, asked)
    there = set(asked)
    unmatched = tuple(rule for rule in experiment.exclude if not any(cell.matches(rule) for cell in cells))
    return Cells(asked, tuple(base for base in base_cells(asked) if base not in there), unmatched)


def _check_size(experiment: Experiment) -> None:
    """Raise ExperimentError, which names the size, if the plan would be too large; no cell is made before."""
    sizes = [
        prod(map(len, [*_fixed_axes(grid, experiment).values(), *_axes(grid, experiment).values()]))
        for grid in experiment.grids
    ]
    cells = sum(sizes)
    _check_limit("grid", f"the grid has {cells} cells", cells, MAX_CELLS)
    blocks = experiment.throughput.most_blocks if experiment.throughput else 0
    seeds = len(experiment.convergence.seeds) if experiment.convergence else 0
    trials = cells * (blocks + seeds)
    counted = " and ".join(f"{n} {name}" for n, name in ((blocks, "blocks"), (seeds, "seeds")) if n)
    _check_limit("grid", f"{cells} cells in {counted} are {trials} trials", trials, MAX_TRIALS)
    values = sum(size * _weight(grid, experiment) for size, grid in zip(sizes, experiment.grids, strict=True))
    _check_limit("grid", f"{cells} cells hold {values} values of options", values, MAX_VALUES)
    filters = [*experiment.exclude, *([experiment.convergence.only] if experiment.convergence else [])]
    wanted = sum(len(as_axis(values)) for rule in filters for values in rule.values())
    compared = f"{wanted} values to look for in {cells} cells are {cells * wanted} comparisons"
    _check_limit("exclude", compared, cells * wanted, MAX_COMPARISONS)


def _check_limit(place: str, what: str, size: int, most: int) -> None:
    if size > most:
        raise ExperimentError(place, [f"{what}; at most {most} are allowed"])


def device_counts(experiment: Experiment) -> tuple[int, ...]:
    """Return the device counts of all grids, sorted, each once."""
    return tuple(sorted({devices for grid in experiment.grids for devices in grid.devices}))


def _axes(grid: Grid, experiment: Experiment) -> dict[str, tuple[PlainValue, ...]]:
    """Return the option axes of a grid: the sections beside it, overridden by its own dotted keys."""
    own = {key: as_axis(value) for key, value in grid.options.items()}
    return {**experiment.option_axes(), **own}


def _fixed_axes(grid: Grid, experiment: Experiment) -> dict[str, tuple[Any, ...]]:
    builtin = BUILTIN_WORKLOADS.get(experiment.workload)
    return {
        "data": grid.data or (builtin.data if builtin else None,),
        "model": grid.model or (builtin.model if builtin else None,),
        "strategy": grid.strategy,
        "device_ids": grid.device_ids or ((),),
        "devices": (None,) if grid.device_ids else grid.devices,  # the number of ids
        "nodes": grid.nodes or (None,),
        "per_device_batch_size": grid.per_device_batch_size or (None,),
        "global_batch_size": grid.global_batch_size or (None,),
        **{name: getattr(grid, name) for name in PLAIN_AXES},
        "launcher": experiment.launcher,
        "variant": tuple(experiment.variants) or (None,),
    }


def _weight(grid: Grid, experiment: Experiment) -> int:
    """Return the maximum number of values in the options of one cell; 100 characters of text count as one more."""

    def weight(value: PlainValue) -> int:
        return sum(1 + (len(leaf) // 100 if isinstance(leaf, str) else 0) for leaf in leaves(value))

    return sum(max(map(weight, values), default=0) for values in _axes(grid, experiment).values())


def _cells(
    grid: Grid, experiment: Experiment, machine: Machine, own_traits: TraitsByName, variants: Variants
) -> Iterator[Cell]:
    fixed, options = _fixed_axes(grid, experiment), _axes(grid, experiment)
    own_names = experiment.own_strategies
    sections = [_sections(dict(zip(options, values, strict=True)), own_names) for values in product(*options.values())]
    for values in product(*fixed.values()):
        point = dict(zip(fixed, values, strict=True))
        own = variants[point["variant"]] if point["variant"] else None
        traits = (own.traits if own else own_traits).get(point["strategy"])
        code = own.version.code if own else None
        for chosen in sections:
            if isinstance(experiment, ScriptExperiment):
                traits, code = experiment.traits_of(chosen.get("workload", {})), experiment.command_code
            yield _cell(point, chosen, experiment, machine, traits, code)


def _cell(
    point: GridPoint,
    options: Mapping[str, Options],
    experiment: Experiment,
    machine: Machine,
    own: StrategyTraits | None,
    code: str | None,
) -> Cell:
    strategy, ids = point["strategy"], point["device_ids"]
    devices = len(ids) if ids else point["devices"]
    traits = own or BUILTIN_TRAITS[strategy]
    nodes, oversubscribed = (1, False) if ids else _nodes(traits, devices, point["nodes"], experiment, machine)
    per_device, total = point["per_device_batch_size"], point["global_batch_size"]
    scaling: Scaling = "weak" if total is None else "strong"
    if total is not None and per_device is not None:
        options = {**options, "training": {**options.get("training", {}), MOST_MICRO_BATCH: per_device}}
    unchanged: Json = {name: point[name] for name in (*TAKEN, *PLAIN_AXES)}
    unchanged |= {field: options.get(section, {}) for section, field in SHARED_SECTIONS.items()}
    loader = unchanged["loader"]
    if machine.device == "cpu" and loader.get("workers", 0) is None:  # beside a GPU the data set decides
        unchanged["loader"] = {**loader, "workers": 0}
    cell = Cell(
        workload=experiment.workload,
        device=machine.device,
        devices=devices,
        nodes=nodes,
        scaling=scaling,
        per_device_batch_size=per_device if total is None else share_of(total, devices),
        global_batch_size=per_device * devices if total is None else total,
        oversubscribed=oversubscribed,
        strategy_options=options.get(strategy, {}),
        code=code,
        own_traits=own,
        **unchanged,
    )
    return cell.with_micro_batches()


def _nodes(
    traits: StrategyTraits, devices: int, asked: int | None, experiment: Experiment, machine: Machine
) -> tuple[int, bool]:
    """Return the number of nodes of a cell, and whether its ranks must share devices."""
    nodes = asked or (1 if traits.one_process else machine.fewest_nodes(devices)) or 1
    fits = devices % nodes == 0 and machine.holds(nodes, devices // nodes)
    possible = machine.holds(nodes, 1) and traits.most_devices != 1
    return nodes, experiment.oversubscribe and not fits and possible


def _sections(point: Mapping[str, PlainValue], own_strategies: Sequence[str] = ()) -> Mapping[str, Options]:
    """Return options by section: ``{'optimizer.lr': 0.1}`` -> ``{'optimizer': {'lr': 0.1}}``.

    ``own_strategies``: sections whose names may hold dots, ``package.module:ClassName``.
    """
    sections: dict[str, dict[str, PlainValue]] = {}
    for name, value in point.items():
        own = next((strategy for strategy in own_strategies if name.startswith(f"{strategy}.")), None)
        section = own or name.partition(".")[0]
        key = name.removeprefix(f"{section}.")
        sections.setdefault(section, {})[key] = list(value) if isinstance(value, tuple) else value
    return sections
