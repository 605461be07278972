"""What can be known to be wrong before anything starts: workloads, optimizers, data paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from harness import workloads
from harness.cell import Cell
from harness.config import Experiment
from harness.optimizers import make_optimizer, make_schedule
from harness.plan import Plan


def check_workloads(plan: Plan) -> None:
    """Builds the workload of every distinct set of parameters, without its data; raises WorkloadError."""
    seen = set()
    for trial in plan.trials:
        cell = trial.cell
        key = (cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items())))
        if key not in seen:
            seen.add(key)
            workloads.build(cell)


def check_optimizers(plan: Plan) -> None:
    """Builds every distinct optimizer and schedule on a model of one weight; raises WorkloadError."""
    seen = set()
    for trial in plan.trials:
        key = (repr(sorted(trial.cell.optimizer.items())), repr(sorted(trial.cell.schedule.items())))
        if key not in seen:
            seen.add(key)
            make_schedule(make_optimizer(nn.Linear(1, 1), trial.cell.optimizer), trial.cell.schedule)


def data_paths(experiment: Experiment, cells: Iterable[Cell]) -> list[str]:
    """Every path that the cells read their data from; what is to be downloaded need not be there."""
    paths: dict[str, None] = {}
    for cell in cells:
        if cell.data and "/" in cell.data:
            paths[cell.data] = None
        folder = cell.workload_options.get("data_folder")
        if isinstance(folder, str) and not cell.workload_options.get("download"):
            paths[folder] = None
    return [str(Path(path).expanduser()) for path in paths]
