"""Static validation before anything starts: workloads, optimizers, the target, data paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import Experiment
from harness.config.strategy_traits import NoOptions, StrategyTraits
from harness.errors import Collected, WorkloadError, nearest
from harness.plan.cell import Cell
from harness.plan.planner import Plan
from harness.train import workloads
from harness.train.optimizers import make_optimizer, make_schedule, rejected
from harness.train.strategies import load_strategy_class
from harness.train.workloads.image_data import CIFAR10_FOLDER, CIFAR10_HINT


def own_traits(experiment: Experiment, found: Collected) -> dict[str, StrategyTraits]:
    """Import the user's own strategies and return their traits, for the planner.

    Without the class of their options, which the processes that the plan is handed to need not be able to import.
    ``found`` gets the WorkloadError of each that cannot be used; its place in the plan is then a stand-in's.
    """
    traits = dict.fromkeys(experiment.own_strategies, StrategyTraits())
    for name in experiment.own_strategies:
        with found.also():
            traits[name] = replace(load_strategy_class(name).traits, options=NoOptions)
    return traits


def all_traits(experiment: Experiment) -> dict[str, StrategyTraits]:
    """Return the traits of the user's own strategies; raises WorkloadError if one cannot be used."""
    found = Collected()
    traits = own_traits(experiment, found)
    found.raise_all()
    return traits


def check_code(plan: Plan) -> None:
    """Raise WorkloadError if the user's code cannot be imported, or does not accept what the experiment asks of it."""
    workloads.load_class(plan.experiment.workload)  # once, if it cannot be imported
    found = Collected()
    with found.also():
        check_workloads(plan)
    with found.also():
        check_target(plan.experiment)
    found.raise_all()


def check_workloads(plan: Plan) -> None:
    """Raise WorkloadError if the workload of some set of parameters cannot be built; data are not read."""
    found, seen = Collected(), set()
    for trial in plan.trials:
        cell = trial.cell
        key = (cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items())))
        if key not in seen:
            seen.add(key)
            with found.also():
                workloads.build(cell)
    found.raise_all()


def check_optimizers(plan: Plan) -> None:
    """Raise WorkloadError if some optimizer or schedule fails in a step on one weight."""
    found, seen = Collected(), set()
    advice = {section: _if_names_vary(plan, section) for section in ("optimizer", "schedule")}
    for trial in plan.trials:
        key = (repr(sorted(trial.cell.optimizer.items())), repr(sorted(trial.cell.schedule.items())))
        if key not in seen:
            seen.add(key)
            _try(trial.cell, found, advice)
    found.raise_all()


def _if_names_vary(plan: Plan, section: str) -> str:
    """Return advice if the names of optimizers or schedules are an axis: all values share the other options."""
    names = {trial.cell.axis(f"{section}.name") for trial in plan.trials}
    known = sorted(str(name) for name in names if name is not None)  # diagnostic cells may have no schedule
    if len(known) < 2:
        return ""
    return (
        f". The options of {section} hold for each of {', '.join(known)}: give one with other options a grid "
        f"of its own below cells, with {section}.name and its options"
    )


@contextmanager
def _advised(advice: str) -> Iterator[None]:
    """Add advice to the message of a WorkloadError that the block raises, once if it holds several."""
    try:
        yield
    except WorkloadError as error:
        if not advice:
            raise
        several = Collected()
        for part in (*error.parts[:-1], WorkloadError(f"{(error.parts or (error,))[-1]}{advice}")):
            several.add(part)
        several.raise_all()


def _try(cell: Cell, found: Collected, advice: Mapping[str, str]) -> None:
    model = nn.Linear(1, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters())  # of a schedule whose optimizer is wrong
    with found.also(), _advised(advice["optimizer"]):
        optimizer = make_optimizer(model, cell.optimizer)
        model(torch.ones(1, 1)).sum().backward()
        try:
            optimizer.step()
        except Exception as error:
            raise rejected("optimizer", cell.optimizer, error) from None
    with found.also(), _advised(advice["schedule"]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an optimizer that failed has taken no step
        schedule = make_schedule(optimizer, cell.schedule)
        try:
            if schedule:
                schedule.step()
        except Exception as error:
            raise rejected("schedule", cell.schedule, error) from None


def check_target(experiment: Experiment) -> None:
    """Raise WorkloadError if the target's metric is no column that the epochs will have."""
    settings = experiment.convergence
    if settings is None or settings.target is None:
        return
    known = ["train_loss", "val_loss"]
    found = workloads.load_class(experiment.workload)
    names = getattr(found, "metric_names", None)
    known += [f"val_{name}" for name in names or ()]
    unnamed = names is None and any(callable(getattr(found, method, None)) for method in ("metrics", "derived"))
    metric = settings.target.metric
    if metric not in known and not (unnamed and metric.startswith("val_")):
        hint = ", or val_<name> of your own metrics" if unnamed else ""
        raise WorkloadError(f"convergence.target.metric: got {metric!r}; {nearest(metric, known)}{hint}")


def download_data(plan: Plan) -> None:
    """Download the data of workloads with ``download: true``, each once, to this machine; raises WorkloadError."""
    cells = {trial.cell.data: trial.cell for trial in plan.trials if trial.cell.workload_options.get("download")}
    for cell in cells.values():
        workloads.build(cell).datasets()


def data_paths(experiment: Experiment, cells: Iterable[Cell]) -> list[str]:
    """Return every path that the cells read data from, except those of data that are downloaded."""
    paths: dict[str, None] = {}
    for cell in cells:
        if cell.data and "/" in cell.data:
            paths[cell.data] = None
        folder = cell.workload_options.get("data_folder")
        cifar10, own = cell.data == "cifar10", cell.workload not in BUILTIN_WORKLOADS
        if isinstance(folder, str) and (cifar10 or own) and not cell.workload_options.get("download"):
            paths[f"{folder}/{CIFAR10_FOLDER}" if cifar10 else folder] = None
    return [str(Path(path).expanduser()) for path in paths]


def missing_data(missing: Mapping[str, Sequence[str]]) -> WorkloadError:
    """Return the error for missing paths; ``missing`` maps each node to its own."""
    where = "; ".join(f"{', '.join(paths)} on {node}" for node, paths in missing.items())
    cifar10 = any(path.endswith(CIFAR10_FOLDER) for paths in missing.values() for path in paths)
    hint = f". {CIFAR10_HINT}" if cifar10 else ""
    return WorkloadError(f"data is missing: {where}. The same path must exist on every node{hint}")
