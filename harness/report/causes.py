"""The sentence on why a setting is not faster, and what to try against each loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.stats import CLEAR, LEAST_BLOCKS
from harness.analysis.verdict import Statement
from harness.analysis.verdict.rules import DATA, HOST, NO_INTERVAL, SAVED, UNCLEAR, WHOLE_WAIT
from harness.analysis.waterfall import PARTS, UNEQUAL_STEPS, Part
from harness.config.axes import BATCHES, LATER, PLAIN_AXES, batch_axis
from harness.config.experiment import Experiment
from harness.config.sections import AUTO
from harness.config.strategy_traits import BROADCAST, BUILTIN_TRAITS, COLLECTIVES, EXCHANGE_CPU, OWN_COLLECTIVES, SPARSE
from harness.config.values import MIB, PlainValue, as_axis
from harness.config.yaml_source import dump
from harness.plan.cell import MOST_MICRO_BATCH
from harness.report.row import Row, Scalar, is_missing, number, plural, rows_of
from harness.report.sentence import MOST_PARTS, Context, Said
from harness.report.tables.text import percent, with_ends


@dataclass(frozen=True)
class Option:
    """An axis of the grid with the values to compare."""

    axis: str
    values: tuple[PlainValue, ...]

    def __str__(self) -> str:
        """Return the line of the grid, as in the experiment file."""
        return dump({self.axis: list(self.values)}, flow=None, width=1000).strip()


BUCKETS = Option("ddp.bucket_cap_mb", (1, 25, 100))
MICRO_BATCHES = 4
ACCUMULATION = Option("training.accumulation", (1, MICRO_BATCHES))
COMPILE = Option("compile", (False, True))
GRAPHS = Option("compile_mode", ("default", "reduce-overhead"))
"""Of a compiled model: CUDA graphs, which the host launches as a whole."""
WORKERS = (0, 2, 4)
LOADER = Option("loader.workers", WORKERS)
IDLE = 0.5
"""The share of its cores below which a rank that waits for data waits for a disk or a network, not for processors."""
FIRST_BUCKET_BYTES, GRADIENT_BYTES = 2**20, 4
"""ddp's first bucket, which any size of buckets leaves, and the gradient of a parameter in it."""
COMPRESSION = Option("ddp.comm_hook", ("none", "bf16_compress"))
VIEWS = Option("ddp.gradient_as_bucket_view", (False, True))
OF_LARGE_GRADIENTS = (BUCKETS, COMPRESSION, VIEWS)
"""What changes the bytes that are sent or copied, of which a gradient within the first bucket has few."""
ADVICE: Mapping[str, tuple[Option, ...]] = {
    "waiting for data": (LOADER,),
    "exposed communication": (BUCKETS, ACCUMULATION, COMPRESSION),
    "wrapper": (COMPILE, ACCUMULATION),
    "all-gather": (Option("fsdp.reshard_after_forward", (True, False)), ACCUMULATION),
    "reduce-scatter": (ACCUMULATION,),
    "shard copies": (Option("fsdp.reshard_after_forward", (True, False)),),
    "smaller batch": (COMPILE,),
    HOST: (COMPILE, GRAPHS),
    BROADCAST: (Option("ddp.broadcast_buffers", (True, False)),),
    EXCHANGE_CPU: (VIEWS, ACCUMULATION),
    **dict.fromkeys(("threads", "replicate", "scatter", "gather", "reduce"), (Option("strategy", ("dp", "ddp")),)),
}
"""By part of the waterfall, what may reduce it, the most likely first."""
MACHINE = {
    "side by side": "Devices that work at once share memory bandwidth, caches or power; no option changes that.",
    "slowest rank": "One rank is slower than the others: tables/ranks.csv and harness doctor say which.",
    UNEQUAL_STEPS: "The work of a step differs between ranks, or single steps are interrupted: batch samples of "
    "similar length together.",
    SPARSE: "Every rank receives the rows of all others: compare a table with sparse=False, whose gradient is dense.",
}
"""By part, what follows from the machine or the model rather than from an option."""
OWN = "The code of the workload, or of an own strategy, exchanges {} in each step: exchange less, or less often."
"""Against collectives of the user's own code."""
IN_PROGRAM: Mapping[str, str] = {
    "waiting for data": "more workers of the DataLoader (num_workers, persistent_workers), or cheaper samples",
    COLLECTIVES.name: "other sizes of buckets (bucket_cap_mb), accumulation with no_sync(), or a communication hook",
}
"""By part, what may reduce it in a script or loop, which has no options of harness."""
LEAST_SHARE = 0.05
"""The least share of a step that is worth a run against it."""
NOTHING_TO_CHANGE = frozenset({*MACHINE, OWN_COLLECTIVES, "rest"})
"""The causes that no option changes: the advice is against the largest of the others."""


def applicable(options: Sequence[Option], row: Row, experiment: Experiment, cores: int | None = None) -> list[Option]:
    """Return those of some options that a cell may have and that the file does not vary already.

    Without what the cell excludes: sizes of buckets, or compression, of a gradient that the first bucket holds, and
    more loader workers than the ``cores`` of a node, if they are given.
    """
    varied = {name for name, values in experiment.option_axes().items() if len(values) > 1}
    varied |= {name for grid in experiment.grids for name, values in grid.options.items() if len(as_axis(values)) > 1}
    varied |= {
        axis
        for axis in ("compile", "compile_mode", "precision", "strategy", *BATCHES)
        for grid in experiment.grids
        if len(getattr(grid, axis) or ()) > 1
    }
    offered = [option for option in options if option.axis not in varied and _applies(option, row)]
    most = math.inf if cores is None else cores // (row.devices // row.nodes)  # a core for each loader worker
    beside = [_beside_own(option, row, most) for option in offered]
    return [option for option in beside if len(option.values) > 1]


def _beside_own(option: Option, row: Row, most_workers: float) -> Option:
    """Return the option with the cell's own value among its values; of loader workers that and larger ones."""
    own = (row.get("options") or {}).get(option.axis)
    values = option.values if own is None or own in option.values else (own, *option.values)
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return Option(option.axis, values)
    if option.axis == LOADER.axis:  # fewer make no wait shorter
        has = own if isinstance(own, int) else 0
        numbers = [int(min(max(has, most_workers), workers)) for workers in (*numbers, 2 * has) if workers >= has]
    return Option(option.axis, tuple(sorted(dict.fromkeys(numbers))))


def _applies(option: Option, row: Row) -> bool:
    """Return whether the cell's strategy and batch have the option."""
    parameters, options = row.get("parameters"), row.get("options") or {}
    bucket = min(FIRST_BUCKET_BYTES, MIB * options.get(BUCKETS.axis, 25))
    if option in OF_LARGE_GRADIENTS and parameters and GRADIENT_BYTES * parameters <= bucket:
        return False
    if option is ACCUMULATION:
        static = options.get("ddp.static_graph")
        return number(row.per_device_batch_size) % MICRO_BATCHES == 0 and not static and not is_automatic(row)
    if option is COMPILE:
        traits = BUILTIN_TRAITS.get(row.strategy)
        return (traits is None or traits.compiles) and not row.get("compile")
    if option is GRAPHS:
        return bool(row.get("compile")) and row.device == "cuda" and row.get("compile_mode", "default") == "default"
    section = option.axis.partition(".")[0]
    return section not in BUILTIN_TRAITS or section == row.strategy


def next_experiment(experiment: Experiment, row: Row, axes: Mapping[str, PlainValue]) -> str:
    """Return an experiment file of one cell of this experiment with some axes as given, all else equal.

    The cell's options that vary in this experiment are held fixed. Trainings to convergence are left out.
    """
    return dump(one_cell(experiment, row, "next", axes), flow=None, width=100)


def one_cell(experiment: Experiment, row: Row, suffix: str, axes: Mapping[str, PlainValue]) -> dict[str, Any]:
    """Return the content of an experiment file of one cell with some axes as given, named with a suffix."""
    given = experiment.model_dump(mode="json", exclude_defaults=True)
    content = {name: value for name, value in given.items() if name not in OF_OTHER_CELLS}
    grid = {**grid_of(row, experiment), **axes}
    content |= {"launcher": row.launcher} if "launcher" in content else {}
    return {**content, **pinned(row, experiment), "name": f"{experiment.name[:40]}-{suffix}", "grid": grid}


OF_OTHER_CELLS = frozenset({"grid", "cells", "exclude", "convergence", "checkpoint", "published", "improve"})
"""The sections of a file that timed trials of one of its cells do without."""


def pinned(row: Row, experiment: Experiment) -> dict[str, object]:
    """Return the section strategy_options with the cell's values of an own strategy's options, which are no axes."""
    content = experiment.strategy_options.model_dump(mode="json", exclude_defaults=True)
    if row.strategy not in content or row.strategy in BUILTIN_TRAITS:
        return {}
    own = {name: row.options.get(f"{row.strategy}.{name}", value) for name, value in content[row.strategy].items()}
    return {"strategy_options": {**content, row.strategy: own}}


def is_automatic(row: Row) -> bool:
    """Return whether the number of micro-batches of a cell follows from its devices."""
    return f"training.{MOST_MICRO_BATCH}" in (row.get("options") or {})


def grid_of(row: Row, experiment: Experiment) -> dict[str, list[PlainValue]]:
    """Return the grid that holds one cell of an experiment alone."""
    options = row.get("options") or {}
    batch = batch_axis(row.scaling)
    most = options.get(f"training.{MOST_MICRO_BATCH}")
    axes = ("data", "model", "strategy", "devices", "nodes", batch, *PLAIN_AXES)
    given = {axis: row.get(axis) for axis in axes}
    grid: dict[str, list[PlainValue]] = {
        axis: [value] for axis, value in given.items() if not is_missing(value) and value != LATER.get(axis)
    }
    varied = (name for name in varied_options(experiment) if name in options and ":" not in name)  # see pinned()
    grid |= {name: [options[name]] for name in varied}
    if most is not None:
        grid |= {"per_device_batch_size": [most], ACCUMULATION.axis: [AUTO]}
    if not is_missing(row.device_ids):
        del grid["devices"]
        grid["device_ids"] = [[int(number) for number in row.device_ids.split(",")]]
    return grid


def varied_options(experiment: Experiment) -> list[str]:
    """Return the options that have several values in the file, or stand in a grid."""
    several = [name for name, values in experiment.option_axes().items() if len(values) > 1]
    return list(dict.fromkeys([*several, *(name for grid in experiment.grids for name in grid.options)]))


def why_not_better(row: Statement, context: Context) -> Said:
    """Return the causes of a cell's loss, of which ``row`` is the first, and what to try against the largest alone."""
    causes = context.causes[str(row.cell_id)]
    certain = certain_of(causes)
    listed = "; ".join(
        f"{_share(one)}{' of the step:' if one is certain[0] else ''} {name_of(one)}{because(one, context)}"
        for one in certain
    )
    few = next((one for one in causes if one.code == NO_INTERVAL and one.subject != HOST), None)
    no_interval = f" No interval: measured in {plural(few.n, 'block')}, {LEAST_BLOCKS} are needed." if few else ""
    parts = [f"{listed or 'no bottleneck is significant'}.{no_interval}"]
    # without the parts that take less than on one device the others may add up to more than is lost
    if saved := [f"{_share(one, sign=-1)} {name_of(one)}" for one in causes if one.code == SAVED]:
        parts.append(f"Saved, compared with one device: {'; '.join(saved)}.")
    if unclear := [f"{percent(one.facts.share)} {name_of(one)}" for one in causes if one.code == UNCLEAR]:
        parts.append(f"Not significant (95 % interval includes 0): {', '.join(unclear)}.")
    advice = {cell_id: _advice(of_cell, context) for cell_id, of_cell in context.causes.items()}
    own = advice[str(row.cell_id)]
    if row.cell_id == next(cell_id for cell_id, text in advice.items() if text == own):  # the same advice once
        parts.append(own)
    return context.short(row.cell_id), " ".join(parts).strip()


def short_causes(row: Statement, context: Context) -> Iterator[Said]:
    """Yield the largest parts of the loss of a cell, and the whole of it, unless a part is not of this loss.

    A wait for data is no part of it if the waterfall has little that is more than its base waits.
    """
    causes = context.causes[str(row.cell_id)]
    certain = certain_of(causes)[:MOST_PARTS]
    waits = [one for one in certain if one.evidence == WHOLE_WAIT]  # of which some is no loss of scaling
    alike = [one for one in waits if _is_of_base(one, context)]
    said = [because(one, context) if one in waits else "" for one in certain]
    of_loss = waits == alike != certain and not any(one.subject == HOST for one in certain)
    named = ", ".join(f"{percent(one.facts.share)} {name_of(one)}{why}" for one, why in zip(certain, said, strict=True))
    ratio, of = context.ratio(row.cell_id), ""
    if ratio and certain and of_loss and not is_missing(ratio.efficiency) and number(ratio.efficiency) < 1:
        lost = round(1 - number(ratio.efficiency), 2)
        saved = round(-sum(number(one.facts.share) for one in causes if one.code == SAVED), 2)
        of_it = [one for one in certain if one not in alike]
        rest = lost + saved - sum(round(number(one.facts.share), 2) for one in of_it)  # adds up as it is written
        more = f"; {percent(rest)} in smaller or uncertain parts" if rest >= LEAST_SHARE else ""
        more += f"; {percent(saved)} saved" if saved >= LEAST_SHARE else ""
        more += f"; measured one by one, they exceed it by {percent(-rest)}" if -rest >= LEAST_SHARE else ""
        of = f", of {percent(lost)} lost{more}"
    yield context.short(row.cell_id) or context.name(row.cell_id), f"{named or 'no bottleneck is significant'}{of}."


def certain_of(causes: Sequence[Statement]) -> list[Statement]:
    """Return the causes that take time by their intervals, or that have none."""
    return [one for one in causes if one.code not in (UNCLEAR, SAVED)]


def name_of(cause: Statement) -> str:
    """Return the part of the step in words."""
    return PARTS.get(str(cause.subject), Part()).words or str(cause.subject)


def _share(cause: Statement, *, sign: int = 1) -> str:
    """Return a share in whole per cent, without the sign of a zero; ``sign`` -1: as what the part saves."""
    share, low, high = cause.facts.share, cause.facts.low, cause.facts.high
    ends = (share, low, high) if sign == 1 else (share, high, low)
    return with_ends(percent, *(None if is_missing(end) else round(sign * number(end), 2) + 0.0 for end in ends))


def because(cause: Statement, context: Context) -> str:
    """Return the reasons of a cause and, if it is the whole wait for data, which is no loss of scaling, the base's."""
    because = f" ({'; '.join(cause.reasons)})" if cause.reasons else ""
    ratio, waits = context.ratio(cause.cell_id), _wait_of_base(cause, context)
    if cause.evidence != WHOLE_WAIT or ratio is None or waits is None:
        return because
    why_none = ", so no loss of scaling" if _is_of_base(cause, context) else ""
    return f"{because} ({percent(waits)} on {plural(ratio.base_devices, 'device')}{why_none})"


def _is_of_base(cause: Statement, context: Context) -> bool:
    """Return whether a cell hardly waits longer for data than its base, which shares of unequal steps cannot say."""
    rows = rows_of(context.table("waterfall"))
    more = (row.share for row in rows if row.cell_id == cause.cell_id and row.part == DATA)
    return abs(next(more, 1.0)) < LEAST_SHARE and bool(_wait_of_base(cause, context))


def _wait_of_base(cause: Statement, context: Context) -> float | None:
    """Return the part of its step that the base of a cell waits for data; None if it is unknown."""
    ratio, phases = context.ratio(cause.cell_id), context.table("phases")
    waits = phases.loc[phases["cell_id"] == (ratio.base_id if ratio else ""), "waits"].dropna()
    return float(waits.iloc[0]) if len(waits) else None


def target(causes: Sequence[Statement]) -> Statement | None:
    """Return the cause that advice is against: the largest that is certain, and that an option may change.

    A wait for data is a measurement of its own, which counts without an interval too; so does an idle GPU, which is
    known from one profile and comes after all others. None if the user's own code
    takes more, or all take less than LEAST_SHARE of the step: no option is worth a run.
    """
    for one in causes:
        certain = one.code == CLEAR or (one.subject in (DATA, HOST) and one.code == NO_INTERVAL)
        if certain and one.subject == OWN_COLLECTIVES:
            return None
        if certain and one.subject not in NOTHING_TO_CHANGE and one.facts.share >= LEAST_SHARE:
            return one
    return None


def _advice(causes: Sequence[Statement], context: Context) -> str:
    if (cause := target(causes)) is not None:
        own = IN_PROGRAM.get(str(cause.subject), "") if context.of_program else ""
        lines = own or "; ".join(map(str, options_of(cause, context)))
        size = _bytes_of(cause.cell_id, context).get(str(cause.subject))
        return f"Against {name_of(cause)}{f' ({int(size):,} bytes)' if size else ''}, try {lines}." if lines else ""
    cell_id = causes[0].cell_id
    unchanged = (one.subject for one in causes if one.code == CLEAR and one.subject in (*MACHINE, OWN_COLLECTIVES))
    part = next(unchanged, None)
    if part == OWN_COLLECTIVES:
        given = [(name, size) for name, size in _bytes_of(cell_id, context).items() if name not in (BROADCAST, SPARSE)]
        return OWN.format(", ".join(f"{name} of {int(size):,} bytes" for name, size in given))
    if part == "side by side" and context.has_doubt("shared by ranks", cell_id):
        return "The ranks are pinned to the same processors: give each its own, or none."
    return MACHINE[part] if part else ""


def _bytes_of(cell_id: Scalar, context: Context) -> Mapping[str, float]:
    """Return what a rank of a cell gives in a step to exchanges beside that of gradients; empty if not known."""
    trials = context.table("trials")
    known = trials.loc[trials["cell_id"] == cell_id, "exchange_bytes"].dropna()
    return known.iloc[-1] if len(known) else {}


def options_of(cause: Statement, context: Context) -> list[Option]:
    """Return the options that may reduce a cause, without those that the file varies already."""
    options, cell = ADVICE.get(str(cause.subject), ()), context.cells.get(str(cause.cell_id))
    if cause.subject == HOST and cell is not None:
        batch = batch_axis(cell.scaling)
        options = (*options, Option(batch, (cell[batch], 2 * cell[batch])))
    return [] if context.of_program else options_in(options, cause.cell_id, context)


def options_in(options: Sequence[Option], cell_id: Scalar, context: Context) -> list[Option]:
    """Return those of some options that a cell of the run has and the file does not vary."""
    cell = context.cells.get(str(cell_id))
    if cell is None:
        return []
    trials = context.table("trials").dropna(subset="parameters")  # which an examination, the first, does not know
    known = trials.loc[trials["cell_id"] == cell_id, "parameters"]
    cell = Row(cell, parameters=known.max() if len(known) else None)
    nodes = [node for group in context.results.environment.get("groups", []) for node in group["nodes"]]
    cores = min((node["cores"] for node in nodes if node["cores"]), default=None)
    restricted = None if cores is not None and _is_idle(cell, cores, context) else cores
    return applicable(options, cell, context.results.experiment, restricted)


def _is_idle(cell: Row, cores: int, context: Context) -> bool:
    """Return whether the ranks and loader workers of a cell left most of their cores unused, as beside a slow disk.

    ``cores``: of a node.
    """
    trials, ranks = context.table("trials"), context.table("ranks")
    own = ranks[ranks["trial_id"].isin(trials.loc[trials["cell_id"] == cell.cell_id, "trial_id"])]
    processes = 1 + number((cell.get("options") or {}).get("loader.workers") or 0)
    used = min(processes, cores * cell.nodes / cell.devices)
    return bool(own["own_cpu_s"].sum() < IDLE * used * own["watched_s"].sum())


def smaller_causes(causes: Sequence[Statement], context: Context) -> Iterator[str]:
    """Yield what may be tried against the certain causes that are smaller than the one that advice is against."""
    first = target(causes)
    for one in causes:
        lines = "; ".join(map(str, options_of(one, context)))
        if lines and one is not first and one.code == CLEAR:
            yield f"{context.name(one.cell_id)}, against {name_of(one)}: {lines}."
