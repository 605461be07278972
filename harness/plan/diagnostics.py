"""The diagnostic trials: A/A twins, bases with all threads, parts of the waterfall, profiles, checks, links.

Training, examinations and links are the same under either launcher. If there are cells of both, those under Ray are
preferred, which starts the processes of a group once for all its trials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from harness.config.experiment import Experiment
from harness.config.sections import LOOKS, Throughput
from harness.config.strategy_traits import BASE_STRATEGY
from harness.config.values import variables_of
from harness.plan.cell import Cell, Placement, place
from harness.plan.comparison import base_cell, base_cells, equivalence_cell, explaining_cells
from harness.plan.inventory import Machine
from harness.plan.rows import Purpose
from harness.plan.trial import Trial

GPU_LINKS_S, CPU_LINKS_S = 5.0, 1.0
"""Default of ``throughput.links_seconds``: on CPU slots, whose links are the host's memory, runs are short."""
FIRST = (0,)
"""The block in which every runnable cell has a trial."""
LEAST_CHECK_BATCH = 8
"""The smallest global batch of an equivalence check."""


def with_diagnostics(trials: Sequence[Trial], experiment: Experiment, machine: Machine) -> list[Trial]:
    """Return the runnable trials with their diagnostic trials, which are runnable too: they need no more devices."""
    settings, seed = experiment.throughput, experiment.seed
    cells = dict.fromkeys(trial.cell for trial in trials if trial.kind == "throughput")
    trials = list(trials)
    if settings and settings.twin:
        trials += _in_blocks("twin", base_cells(cells), range(settings.most_blocks), seed)
        trials += _all_threads(cells, machine, settings.most_blocks, seed)
    if settings and settings.explain:
        more = [cell for cell in explaining_cells(cells) if cell not in cells]
        trials += _in_blocks("explain", more, range(settings.most_blocks), seed)
        trials += _profiles(cells, settings.most_blocks, seed)
        trials += _links_trials(trials, seed) if seconds_of_links(settings, machine.device) else []
    trials = _with_checks(trials, seed) if experiment.equivalence else list(map(_checked_by_itself, trials))
    return trials + doctor_trials(trials, seed) if experiment.preflight else trials


def _all_threads(cells: Iterable[Cell], machine: Machine, blocks: int, seed: int) -> list[Trial]:
    """Return each base on one CPU slot once more, with the threads of all slots of its node.

    What several devices of a node without GPUs have to beat. One base of a model, that of the largest batch, in as many
    blocks as an interval needs, or if they take a second rather than an interpreter's start, as make it narrow.
    """
    threads = machine.threads_per_device * max(machine.devices_per_node, default=0)
    if machine.device != "cpu" or threads == machine.threads_per_device:
        return []
    largest: dict[tuple[str, str, str], Cell] = {}
    for cell in base_cells(cells):
        own_threads = cell.traits.own_program and not cell.traits.own_ranks  # of a loop, in a thread of its own
        if cell.devices == 1 and not (cell.emulated_compute or cell.oversubscribed or cell.variant or own_threads):
            model = (cell.workload, str(cell.data), str(cell.model))
            largest[model] = max(largest.get(model, cell), cell, key=lambda one: one.global_batch_size)
    return [
        replace(trial, threads=threads)
        for cell in largest.values()
        for trial in _in_blocks("threads", [cell], range(min(blocks, LOOKS[not cell.traits.own_program])), seed)
    ]


def _profiles(cells: Collection[Cell], blocks: int, seed: int) -> list[Trial]:
    """Return the profiles of the collectives of each cell on several devices whose strategy is explained by them.

    On GPUs all other cells are profiled too, in the first block: for the time in which the GPU is busy.
    A trial of its own, after the timed ones of its worker group: CUPTI may stay attached and slow what follows in the
    process. The collectives are the same under either launcher, so of two a cell is profiled under Ray.
    """
    wanted = [cell for cell in cells if cell.launcher == "ray" or replace(cell, launcher="ray") not in cells]
    explained = [cell for cell in wanted if cell.traits.profiled_parts and cell.devices > 1]
    others = [
        cell for cell in wanted if cell.device == "cuda" and cell not in explained and not cell.traits.own_program
    ]
    return _in_blocks("profile", explained, range(blocks), seed) + _in_blocks("profile", others, FIRST, seed)


def traces(cells: Sequence[Cell], block: int, seed: int, most_bytes: int) -> list[Trial]:
    """Return the profiles of cells whose traces are kept, of at most ``most_bytes`` together."""
    of_rank = most_bytes // sum(place(cell).workers for cell in cells)
    return [replace(trial, trace_bytes=of_rank) for trial in _in_blocks("profile", cells, [block], seed)]


def _in_blocks(purpose: Purpose, cells: Iterable[Cell], blocks: Iterable[int], seed: int) -> list[Trial]:
    cells = list(cells)
    return [Trial(cell, "diagnostic", block, seed, added=True, purpose=purpose) for block in blocks for cell in cells]


def _with_checks(trials: Sequence[Trial], seed: int) -> list[Trial]:
    """Return the trials with the ids of their equivalence checks, then these checks and their references.

    The checks are in the first block.
    """
    compared = [trial.cell for trial in trials if trial.cell.strategy != BASE_STRATEGY]
    if not compared:
        return list(trials)
    batch = max(LEAST_CHECK_BATCH, 2 * max(cell.devices for cell in compared))  # at least two samples for each device
    launcher = "ray" if any(cell.launcher == "ray" for cell in compared) else compared[0].launcher
    by_cell = {cell: replace(equivalence_cell(cell, batch), launcher=launcher) for cell in dict.fromkeys(compared)}
    known = [replace(t, check_id=by_cell[t.cell].id) if t.cell in by_cell else t for t in trials]
    checks = dict.fromkeys(by_cell.values())
    references = dict.fromkeys(map(base_cell, checks))
    return known + _in_blocks("equivalence", {**checks, **references}, FIRST, seed)


def _checked_by_itself(trial: Trial) -> Trial:
    """Return a script's trial of several ranks, which records whether they are connected, as its own check."""
    own = trial.cell.traits.own_program and trial.cell.devices > 1
    return replace(trial, check_id=trial.cell.id) if own else trial


def doctor_trials(trials: Iterable[Trial], seed: int) -> list[Trial]:
    """Return the examinations: each strategy with each model on its most devices, and each number of devices once.

    With variants, of each of them. If the cells of a strategy and a model differ in a number of their optimizer, such
    as the learning rate, those with its smallest and its largest value stand for the others.

    They come first in their worker groups. Groups are in random order, so that trials of the same kind in other groups
    of the block may come before them.
    """
    trials = [trial for trial in trials if trial.kind != "diagnostic"]
    cells = _ray_first(trials)
    largest = sorted(cells, key=lambda cell: (-cell.devices, -cell.global_batch_size))
    kinds: dict[tuple[str, ...], list[Cell]] = {}
    for cell in largest:
        kinds.setdefault(cell.workload_key, []).append(cell)
    extremes = [cell for kind in kinds.values() for cell in _extremes(kind)]
    swept = {cell.workload_key for cell in extremes}
    chosen = dict.fromkeys([*extremes, *(kind[0] for key, kind in kinds.items() if key not in swept)])
    sizes = {(cell.strategy, cell.devices, cell.variant) for cell in chosen}
    for cell in sorted(cells, key=lambda cell: cell.global_batch_size):  # the smallest batch of a device count suffices
        if (size := (cell.strategy, cell.devices, cell.variant)) not in sizes:
            chosen[cell] = None
            sizes.add(size)
    return _in_blocks("doctor", chosen, FIRST, seed)


def _ray_first(trials: Iterable[Trial]) -> list[Cell]:
    """Return the cells of these trials, each once, those under Ray first, of these those without variables."""
    cells = dict.fromkeys(trial.cell for trial in trials)
    return sorted(cells, key=lambda cell: (cell.launcher != "ray", bool(variables_of(cell.env))))


def _extremes(cells: Sequence[Cell]) -> list[Cell]:
    """Return the first cells with the smallest and the largest value of each number of the optimizer that varies."""
    found: list[Cell] = []
    for name in dict.fromkeys(name for cell in cells for name in cell.optimizer):
        given = {cell: cell.optimizer.get(name) for cell in cells}
        values = {cell: n for cell, n in given.items() if isinstance(n, int | float) and not isinstance(n, bool)}
        if len(set(values.values())) > 1:
            found += [min(values, key=values.__getitem__), max(values, key=values.__getitem__)]
    return found


def seconds_of_links(settings: Throughput, device: str) -> float:
    """Return the maximum time of the links of a placement; 0 if they are not to be measured."""
    default = GPU_LINKS_S if device == "cuda" else CPU_LINKS_S
    return default if settings.links_seconds is None else settings.links_seconds


def _links_trials(trials: Iterable[Trial], seed: int) -> list[Trial]:
    """Return the measurements of links and collectives: one in the first block for each placement of several devices.

    Placements whose processes are connected by NCCL and by gloo count as two; on a CPU all are connected by gloo.
    The devices of one CPU process have no links, and devices that ranks share make no claim about speed.
    """
    trials = [trial for trial in trials if trial.kind != "diagnostic"]
    chosen: dict[tuple[Placement, bool], Cell] = {}
    for cell in _ray_first(trials):
        without_links = cell.devices == 1 or cell.oversubscribed or (cell.device == "cpu" and cell.traits.one_process)
        without_links = without_links or cell.traits.own_program  # on whose GPUs nothing else runs
        if not without_links:
            chosen.setdefault((place(cell), cell.device == "cpu" or cell.backend == "gloo"), cell)
    return _in_blocks("links", chosen.values(), FIRST, seed)
