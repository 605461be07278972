"""What to try against a loss: options with values to compare, and an experiment file that compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.config.experiment import Experiment
from harness.config.sections import Grid
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import PlainValue
from harness.config.yaml_source import dump
from harness.report.row import Row, is_missing, number


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
WORKERS = (0, 2, 4)
LOADER = Option("loader.workers", WORKERS)
FIRST_BUCKET_BYTES, GRADIENT_BYTES = 2**20, 4
"""ddp's first bucket, which any size of buckets leaves, and the gradient of a parameter in it."""
COMPRESSION = Option("ddp.comm_hook", ("none", "bf16_compress"))
ADVICE: Mapping[str, tuple[Option, ...]] = {
    "waiting for data": (LOADER,),
    "exposed communication": (BUCKETS, ACCUMULATION, COMPRESSION),
    "wrapper": (COMPILE, ACCUMULATION),
    "all-gather": (Option("fsdp.reshard_after_forward", (True, False)), ACCUMULATION),
    "reduce-scatter": (ACCUMULATION,),
    "shard copies": (Option("fsdp.reshard_after_forward", (True, False)),),
    "smaller batch": (COMPILE,),
    **dict.fromkeys(("threads", "replicate", "scatter", "gather", "reduce"), (Option("strategy", ("dp", "ddp")),)),
}
"""By part of the waterfall, what may reduce it, the most likely first."""
MACHINE = {
    "side by side": "Devices that work at once share memory bandwidth, caches or power; no option changes that.",
    "slowest rank": "One rank is slower than the others: tables/ranks.csv and harness doctor say which.",
}
"""By part, what follows from the machine rather than from an option."""
SLOW_IN_TURN = "The ranks are slow in turn, as if the work of a batch varies, or something interrupts single steps."
"""In place of the slowest rank, if no rank is slower than the others on the whole."""
PINNED = "The ranks are pinned to the same processors: give each its own, or none."
"""In place of what devices share, if it is their processors."""


def options_to_try(part: str, row: Row, experiment: Experiment, cores: int | None = None) -> list[Option]:
    """Return what may reduce a part of a cell's step, without the axes that the file already varies.

    Without what the cell excludes: sizes of buckets, or compression, of a gradient that the first bucket holds, and
    more loader workers than the ``cores`` of a node.
    """
    varied = set(varied_options(experiment))
    for axis in ("compile", "strategy"):
        if any(len(getattr(grid, axis)) > 1 for grid in _grids(experiment)):
            varied.add(axis)
    offered = (_within(cores, option, row) for option in ADVICE.get(part, ()) if option.axis not in varied)
    return [option for option in offered if len(option.values) > 1 and _applies(option, row)]


def _within(cores: int | None, option: Option, row: Row) -> Option:
    """Return the option with no more loader workers a device than the node has cores for each."""
    if option is not LOADER or cores is None:
        return option
    most = cores // (int(number(row["devices"])) // int(number(row["nodes"])))
    return Option(option.axis, tuple(dict.fromkeys(min(workers, most) for workers in WORKERS)))


def _applies(option: Option, row: Row) -> bool:
    """Return whether the cell's strategy and batch have the option."""
    gradient_bytes = None if is_missing(row.get("parameters")) else GRADIENT_BYTES * number(row["parameters"])
    if option in (BUCKETS, COMPRESSION) and gradient_bytes and gradient_bytes <= FIRST_BUCKET_BYTES:
        return False
    section = option.axis.partition(".")[0]
    traits, options = BUILTIN_TRAITS.get(str(row["strategy"])), row.get("options")
    if option is ACCUMULATION:
        static = isinstance(options, Mapping) and options.get("ddp.static_graph")
        return number(row["per_device_batch_size"]) % MICRO_BATCHES == 0 and not static
    if option is COMPILE:
        return traits is None or traits.compiles
    return section not in BUILTIN_TRAITS or section == row["strategy"]


def next_experiment(experiment: Experiment, row: Row, options: Mapping[str, PlainValue], option: Option) -> str:
    """Return an experiment file that compares the values of one option in one cell of this experiment, all else equal.

    ``options``: the cell's; those that vary in this experiment are held fixed. Trainings to convergence are left out.
    """
    content = experiment.model_dump(mode="json", exclude_defaults=True)
    for name in ("cells", "exclude", "convergence", "checkpoint", "published"):
        content.pop(name, None)
    batch = "global_batch_size" if row["scaling"] == "strong" else "per_device_batch_size"
    axes = ("data", "model", "strategy", "devices", "nodes", batch, "precision", "compile", "variant")
    grid: dict[str, list[PlainValue]] = {axis: [row[axis]] for axis in axes if not is_missing(row.get(axis))}
    grid |= {name: [options[name]] for name in varied_options(experiment) if name in options}
    if not is_missing(row["device_ids"]):
        del grid["devices"]
        grid["device_ids"] = [[int(number) for number in str(row["device_ids"]).split(",")]]
    content |= {"name": f"{experiment.name[:40]}-next", "grid": {**grid, option.axis: list(option.values)}}
    return dump(content, flow=None, width=100)


def varied_options(experiment: Experiment) -> list[str]:
    """Return the options that have several values in the file, or stand in a grid."""
    several = [name for name, values in experiment.option_axes().items() if len(values) > 1]
    return list(dict.fromkeys([*several, *(name for grid in _grids(experiment) for name in grid.options)]))


def _grids(experiment: Experiment) -> tuple[Grid, ...]:
    return (*([experiment.grid] if experiment.grid else []), *experiment.cells)
