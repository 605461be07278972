"""The planner: experiment and inventory in; blocks, worker groups, trials, and what cannot run, out. Runs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from harness.config.experiment import Experiment
from harness.config.sections import Convergence, Throughput
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import PlainValue, variables_of
from harness.errors import ExperimentError
from harness.plan import diagnostics
from harness.plan.cell import Cell, Placement, place, why_none
from harness.plan.comparison import axes_of, base_cell, base_cells, comparable, explaining_cells
from harness.plan.feasibility import reason_of_impossibility, reason_to_skip
from harness.plan.grid import NO_TRAITS, NO_VARIANTS, TraitsByName, Variants, device_counts, expand
from harness.plan.inventory import Inventory, Machine, resolve
from harness.plan.labels import Labels
from harness.plan.rows import Purpose
from harness.plan.trial import PURPOSES, SkipReason, Trial, WorkerGroup
from harness.system.process import no_garbage_collection


def convergence_trials(asked: Sequence[Cell], settings: Convergence, machine: Machine) -> list[Trial]:
    """Return one trial a cell and seed, under Ray if the grid has it; the k-th seed runs in block k.

    Raise ExperimentError if no cell, or none on one of the named device counts, is left.
    """
    chosen = [cell for cell in asked if cell.matches(settings.only) and cell.traits.trains]
    if "launcher" not in settings.only:  # the launcher changes the speed, which is measured, not the curves
        chosen = [cell for cell in chosen if cell.launcher == "ray"] or chosen
    if not chosen:
        raise ExperimentError("convergence.only", [f"got {settings.only}; no cell of the grid matches"])
    chosen = _chosen([as_trained(cell, settings) for cell in chosen], settings, machine)
    if settings.global_batch_size:
        chosen = [as_trained(cell.at_global_batch_size(settings.global_batch_size), settings) for cell in chosen]
    cells = dict.fromkeys(chosen)
    bases = {**base_cells(chosen), **{base_cell(cell): None for cell in chosen if cell.uneven}}
    return [
        Trial(cell, "convergence", block, seed, added=cell not in cells)
        for block, seed in enumerate(settings.seeds)
        for cell in {**cells, **bases}
    ]


def as_trained(cell: Cell, settings: Convergence) -> Cell:
    """Return the cell with its flag ``uneven``: built-in strategies train on unequal shares if the file says so."""
    uneven = settings.uneven and cell.per_device_batch_size is None and cell.strategy in BUILTIN_TRAITS
    return replace(cell, uneven=uneven or None)


def why_trained(settings: Convergence) -> str:
    """Return the reason for the choice of cells, as the options of the file determine it."""
    named = [axis for axis in settings.only if axis != "devices"]
    rules = [f"cells that match convergence.only ({', '.join(named)})"] if named else []
    if settings.devices:
        rules.append(f"on the devices of convergence.devices, {', '.join(map(str, settings.devices))}")
    elif "devices" in settings.only:
        rules.append("on the devices of convergence.only")
    else:
        rules.append("each strategy on the most devices that it can have here")
    if settings.global_batch_size:
        rules.append("at convergence.global_batch_size")
    elif not settings.names_batch:
        rules.append("at the first batch size of the grid")
    return f"{', '.join(rules)}; and the base of each"


def _chosen(cells: Sequence[Cell], settings: Convergence, machine: Machine) -> list[Cell]:
    """Return the cells on the named device counts, else each strategy's largest that can run; of one batch size.

    Named ones that cannot run here become skipped rows with a reason. Raise ExperimentError if a named count has no
    cell, or none of that batch size.
    """
    counts = sorted({cell.devices for cell in cells})
    if absent := [str(count) for count in settings.devices or () if count not in counts]:
        allowed = ", ".join(map(str, counts))
        raise ExperimentError("convergence.devices", [f"got {', '.join(absent)}; allowed: {allowed}"])
    if settings.devices:
        chosen = [cell for cell in cells if cell.devices in settings.devices]
    else:
        chosen = [cell for cell in cells if reason_to_skip(cell, machine) is None] or list(cells)
    if not settings.names_batch:
        first = _batch(chosen[0])
        without = {cell.devices for cell in chosen}
        chosen = [cell for cell in chosen if _batch(cell) == first]
        without -= {cell.devices for cell in chosen}
        if settings.devices and without:
            problem = (
                f"got {', '.join(map(str, sorted(without)))}, without a cell at the first batch size, {first}; give "
                "convergence.global_batch_size, or the batch sizes to train at in convergence.only"
            )
            raise ExperimentError("convergence.devices", [problem])
    if settings.devices is None and "devices" not in settings.only:
        most = {cell.strategy: cell.devices for cell in sorted(chosen, key=lambda cell: cell.devices)}
        chosen = [cell for cell in chosen if cell.devices == most[cell.strategy]]
    return chosen


def _batch(cell: Cell) -> int | None:
    return cell.per_device_batch_size if cell.scaling == "weak" else cell.global_batch_size


GROUP_START_S: Mapping[str, float] = {"ray": 7.0, "torchrun": 5.0}
"""The least time of the start and end of a worker group's processes, by launcher: measured on 2 CPU cores.

There 7 to 13 s under Ray, 5 to 7 s under torchrun.
"""
SCRIPT_START_S = 4.0
"""The least time in which a script starts, imports torch and ends beside its windows: 5 to 7 s on 2 CPU cores."""
CUDA_WARMUP_S = 5.0
"""Least seconds of warm-up on GPUs: clocks and power limits settle over seconds, which may be thousands of steps."""


@dataclass(frozen=True)
class Plan:
    """The worker groups of a run in their order, the trials that cannot run here, the cells that cannot run anywhere.

    ``variants``: the code of each. ``unmatched``: the rules of ``exclude`` that no cell matches.
    """

    experiment: Experiment
    inventory: Inventory
    machine: Machine
    groups: tuple[WorkerGroup, ...]
    skips: Mapping[Trial, SkipReason]
    impossible: Mapping[Cell, SkipReason] = field(default_factory=dict)
    variants: Variants = field(default_factory=dict)
    unmatched: Sequence[Mapping[str, PlainValue]] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of all groups; skipped ones are in ``skips``."""
        return tuple(trial for group in self.groups for trial in group.trials)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len({group.block for group in self.groups})

    @cached_property
    def labels(self) -> Labels:
        """The labels of its cells: what differs among those of the file and the bases, skipped ones included.

        A plan of diagnostic trials alone, such as one of links, has theirs.
        """
        cells = dict.fromkeys(t.cell for t in _all(self) if t.kind != "diagnostic")
        return Labels(map(axes_of, cells or dict.fromkeys(t.cell for t in _all(self))))

    def keeping(self, wanted: Callable[[Trial], bool]) -> Plan:
        """Return the plan with the wanted trials only, and with the worker groups that still have some."""
        groups = (group.keeping(wanted) for group in self.groups)
        return replace(self, groups=tuple(group for group in groups if group.trials))

    def least_trial_seconds(self, trial: Trial) -> float:
        """Return a lower bound of a trial's time inside its worker group: shortest warm-up and windows, no epochs."""
        settings = self.experiment.throughput
        if settings is None or not trial.timed:
            return 0.0
        start_s = SCRIPT_START_S if self.experiment.programs else 0.0
        return start_s + least_warmup_s(settings, trial.cell.device) + settings.windows * settings.window_seconds


def least_warmup_s(settings: Throughput, device: str) -> float:
    """Return the least seconds of warm-up after its first round, on a device of this type: 'cpu' or 'cuda'."""
    if settings.warmup_seconds is not None:
        return settings.warmup_seconds
    return CUDA_WARMUP_S if device == "cuda" else 0.0


@no_garbage_collection()
def make_plan(
    experiment: Experiment, inventory: Inventory, own_traits: TraitsByName = NO_TRAITS, variants: Variants = NO_VARIANTS
) -> Plan:
    """Return the plan of an experiment on an inventory; raise ExperimentError if no cell is left by ``exclude``.

    ``own_traits``: the traits of the user's own strategies, which the planner does not import. ``variants``: the code
    of each variant, with its own traits.
    """
    inventory = inventory.with_gpu_memory(experiment.hardware.memory_gb)
    counts = device_counts(experiment)
    machine = resolve(inventory, request=experiment.device, device_counts=counts, emulated=experiment.emulated_compute)
    cells = expand(experiment, machine, own_traits, variants)
    possible = [cell for cell in cells.asked if reason_of_impossibility(cell) is None]
    bases = base_cells(possible)
    trials: list[Trial] = []
    if experiment.throughput:
        added = dict.fromkeys(cell for cell in cells.added if cell in bases)
        trials += [
            Trial(cell, "throughput", block, experiment.seed, added=cell in added)
            for block in range(experiment.throughput.most_blocks)
            for cell in (*possible, *added)
        ]
    if experiment.convergence:
        trials += convergence_trials(cells.asked, experiment.convergence, machine)
    uneven = {replace(trial.cell, uneven=None) for trial in trials if trial.cell.uneven}
    timed = [cell for cell in cells.asked if experiment.throughput or cell not in uneven]
    planned = dict.fromkeys([*timed, *(trial.cell for trial in trials)])
    impossible = {cell: reason for cell in planned if (reason := reason_of_impossibility(cell))}
    trials = [trial for trial in trials if trial.cell not in impossible]
    reasons = {cell: reason_to_skip(cell, machine) for cell in {trial.cell for trial in trials}}
    skips = {trial: reason for trial in trials if (reason := reasons[trial.cell])}
    runnable = diagnostics.with_diagnostics([trial for trial in trials if trial not in skips], experiment, machine)
    groups = _worker_groups(runnable, experiment.seed)
    return Plan(experiment, inventory, machine, groups, skips, impossible, variants, cells.unmatched)


def _worker_groups(trials: Iterable[Trial], seed: int) -> tuple[WorkerGroup, ...]:
    """Return worker groups: blocks in order, groups of a block and trials of a group in random order by ``seed``.

    Each second block reverses the order of the one before: what comes first in a group is slower by some percent on a
    CPU, and must not be the same cell in most blocks.
    """
    groups: list[WorkerGroup] = []
    trials = sorted(trials, key=lambda t: t.block)
    placements = {cell: place(cell) for cell in dict.fromkeys(trial.cell for trial in trials)}
    first: dict[Cell, int] = {}
    numbers = {cell: [number] for number, cell in enumerate(placements)}
    for cell, own in numbers.items():
        if cell.variant:  # first the number of the first version, so that versions stay together
            own.insert(0, first.setdefault(replace(cell, variant=None, code=None), own[0]))
    for block, in_block in groupby(trials, key=lambda t: t.block):
        place_of = _random_places(f"{seed}:{block // 2}", reverse=bool(block % 2))
        by_key: dict[GroupKey, list[Trial]] = {}
        for trial in in_block:
            cell = trial.cell
            twin, variants = trial.purpose == "twin", tuple(filter(None, [cell.variant]))
            asked = (placements[cell], cell.oversubscribed, cell.launcher, cell.backend)
            key = GroupKey(*asked, twin, variants, variables_of(cell.env))
            by_key.setdefault(key, []).append(trial)
        by_key = _side_by_side(_shared(by_key))
        # groups of one variant each follow each other, if they differ in nothing else: both are as slow in a slow hour
        order = sorted(by_key, key=lambda key: (place_of(key._replace(variants=())), place_of(key)))
        for position, key in enumerate(order):
            members = by_key[key]
            members.sort(key=lambda trial: [place_of((number, trial.purpose)) for number in numbers[trial.cell]])
            # diagnostic checks first, epochs and links late: their failure costs no timed window of its block; profiles
            # last: the profiler may stay attached and slow what follows in the process
            members.sort(key=_turn)
            placement, oversubscribe, launcher, backend, _, variants, env = key
            device, name = members[0].cell.device, f"b{block}-g{position}"
            where = (placement, device, oversubscribe)
            groups.append(WorkerGroup(name, block, *where, tuple(members), launcher, backend, variants, env))
    return tuple(groups)


def _random_places(seed: str, *, reverse: bool) -> Callable[[object], int]:
    """Return a function that gives a thing a random place, a sort key; with ``reverse`` from the other end."""
    sign = -1 if reverse else 1
    return lambda thing: sign * int(hashlib.sha256(f"{seed}:{thing}".encode()).hexdigest(), 16)


def trace_groups(plan: Plan, cells: Sequence[Cell], most_bytes: int) -> tuple[WorkerGroup, ...]:
    """Return worker groups, after all blocks of the plan, that profile cells and keep the traces of their ranks."""
    settings, seed = plan.experiment.throughput, plan.experiment.seed
    return _worker_groups(diagnostics.traces(cells, settings.most_blocks if settings else 0, seed, most_bytes), seed)


class GroupKey(NamedTuple):
    """What the trials of a worker group have in common; ``twin``: A/A twins, which no base of their process joins."""

    placement: Placement
    oversubscribed: bool
    launcher: str
    backend: str
    twin: bool
    variants: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def _shared(trials: Mapping[GroupKey, list[Trial]]) -> dict[GroupKey, list[Trial]]:
    """Return the trials by worker group, where smaller placements join the group of a larger one that can run them.

    A twin joins a group with ranks for its base beside it, so that an A/A test is across processes.
    """
    shared: dict[GroupKey, list[Trial]] = {}
    for key in sorted(trials, key=lambda key: (key.twin, -key.placement.devices, -key.placement.workers)):
        placement, members = key.placement, trials[key]
        hosts = [
            host
            for host in shared
            if host._replace(placement=placement, twin=key.twin) == key
            and host.placement.holds(placement)
            and host.placement.nodes == 1
            and (not key.twin or (host.placement.workers >= 2 * placement.workers and not host.twin))
        ]
        joins = hosts and not why_apart(members[0].cell)
        shared.setdefault(hosts[0] if joins else key, []).extend(members)
    return shared


def why_apart(cell: Cell) -> str:
    """Return why the trials of a cell join no larger worker group; empty if they may."""
    if cell.device != "cpu":
        return "NCCL connects once a process"  # launch/subgroups.py
    if cell.nodes > 1:
        return "on several nodes"
    if cell.traits.own_program and not cell.traits.own_ranks:
        return "the user's loop reads the number of ranks"
    return ""


def _side_by_side(trials: Mapping[GroupKey, list[Trial]]) -> dict[GroupKey, list[Trial]]:
    """Return the trials by worker group, where all variants that one node's CPU slots run alike are in one group.

    Each in processes of its own, as a process imports one version of a module.
    """
    alike: dict[GroupKey, list[GroupKey]] = {}
    for key in sorted(trials):
        cell = trials[key][0].cell
        joins = cell.device == "cpu" and key.placement.nodes == 1 and not key.oversubscribed
        alike.setdefault(key._replace(variants=()) if joins else key, []).append(key)
    return {
        keys[0]._replace(variants=tuple(name for key in keys for name in key.variants)): [
            trial for key in keys for trial in trials[key]
        ]
        for keys in alike.values()
    }


def _turn(trial: Trial) -> int:
    """Return the sort key of a trial in its worker group."""
    return PURPOSES[trial.purpose].order if trial.purpose else int(trial.kind == "convergence")


def bases_first(groups: Iterable[WorkerGroup], blocks: Collection[int]) -> tuple[WorkerGroup, ...]:
    """Return worker groups in the order of their blocks; in ``blocks`` bases come before other timed trials."""
    ordered = [
        replace(group, trials=tuple(sorted(group.trials, key=lambda trial: (_turn(trial), not is_base(trial)))))
        if group.block in blocks
        else group
        for group in groups
    ]
    return tuple(sorted(ordered, key=lambda g: (g.block, g.block in blocks and not any(map(is_base, g.trials)))))


def is_base(trial: Trial) -> bool:
    """Return whether other trials of its block are compared with this one."""
    cell = trial.cell
    return trial.timed and not trial.repeats and comparable(cell) and base_cell(cell) == cell


def codes_of(plan: Plan) -> dict[str, str]:
    """Return the hash of each variant's code."""
    return {name: own.version.code for name, own in plan.variants.items()}


def single_rank_only(plan: Plan) -> Plan:
    """Return the plan for ``--inline``: trials of worker groups of several ranks become skips.

    Without profiles: all groups share one process, whose timed trials would follow them.
    """
    skips = {
        trial: SkipReason("inline", f"--inline runs one rank in this process; this cell needs {what}")
        for trial in plan.trials
        if (what := _needs_of_processes(trial.cell))
    }
    kept = plan.keeping(lambda trial: trial not in skips and trial.purpose != "profile")
    groups = tuple(part for group in kept.groups for part in by_placement(group))
    return replace(kept, groups=groups, skips={**plan.skips, **skips})


def _needs_of_processes(cell: Cell) -> str:
    """Return what a cell needs that the command's own process is not; empty if it needs nothing else."""
    if (workers := place(cell).workers) > 1:
        return str(workers)
    return f"a process that starts with {' '.join(sorted(cell.env))}" if variables_of(cell.env) else ""


def by_placement(group: WorkerGroup) -> Iterator[WorkerGroup]:
    """Yield a group for each placement of a group's trials, for A/A twins, and for each variant."""
    parts: dict[tuple[Placement, bool, str | None], list[Trial]] = {}
    for trial in group.trials:
        parts.setdefault((place(trial.cell), trial.purpose == "twin", trial.cell.variant), []).append(trial)
    for number, ((placement, _, variant), trials) in enumerate(parts.items()):
        name = f"{group.id}.{number}" if number else group.id
        variants = (variant,) if variant else ()
        yield replace(group, id=name, placement=placement, trials=tuple(trials), variants=variants)


def by_variant(group: WorkerGroup) -> list[WorkerGroup]:
    """Return a group for each variant of a group's trials."""

    def of(name: str) -> WorkerGroup:
        return group.keeping(lambda trial: trial.cell.variant == name)

    return list(map(of, group.variants))


def filter_plan(plan: Plan, wanted: Mapping[str, PlainValue]) -> Plan:
    """Return the part of a plan whose cells match a filter, with the trials that they need.

    Raise ExperimentError if no cell matches.
    """
    matching = {trial.cell for trial in _all(plan) if trial.kind != "diagnostic" and trial.cell.matches(wanted)}
    impossible = {cell: reason for cell, reason in plan.impossible.items() if cell.matches(wanted)}
    if not (matching or impossible):
        cells = {trial.cell for trial in _all(plan)} | {*plan.impossible}
        raise ExperimentError("--only", [f"no cell of {plan.experiment.name} matches: {why_none(cells, wanted)}"])
    cells = matching | set(base_cells(matching))
    needed = _needed_cells(plan, cells)
    skips = {trial: reason for trial, reason in plan.skips.items() if trial.cell in cells}
    kept = plan.keeping(lambda trial: trial.cell in needed[trial.purpose])
    return replace(kept, skips=skips, impossible=impossible)


def _needed_cells(plan: Plan, cells: set[Cell]) -> dict[Purpose, set[Cell]]:
    """Return the cells whose trials are needed to measure these cells, by the purpose of the trial."""
    beside = set(explaining_cells(cells)) if plan.experiment.explains else set()
    check_ids = {trial.check_id for trial in plan.trials if trial.cell in cells}
    checks = {trial.cell for trial in plan.trials if trial.cell.id in check_ids}
    placements = set(map(place, cells))
    return {
        "": cells | beside,
        "twin": cells,
        "threads": cells,
        "explain": beside,
        "profile": cells,
        "equivalence": checks | set(map(base_cell, checks)),
        "doctor": cells,
        "links": {trial.cell for trial in plan.trials if trial.purpose == "links" and place(trial.cell) in placements},
    }


def _all(plan: Plan) -> list[Trial]:
    return [*plan.trials, *plan.skips]
