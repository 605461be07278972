"""The validation metrics of a saved model: a checkpoint of a convergence trial, on one device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.experiment import load_experiment
from harness.errors import RunFolderError, WorkloadError
from harness.measure.convergence import Evaluator
from harness.measure.epoch_data import EpochData
from harness.run.prepare import import_path
from harness.system.code_version import module_file
from harness.train import workloads
from harness.train.checkpoint import files
from harness.train.checkpoint.state import State
from harness.train.checkpoint.trained import cell_of, check_code
from harness.train.ranks import Ranks
from harness.train.training import Training


def evaluate(checkpoint: Path, file: Path | None = None, *, no_user_code: bool = False) -> dict[str, float]:
    """Return the validation metrics of the model in a checkpoint, each sample exactly once.

    ``checkpoint``: a folder epoch-N, or that of its trial for the newest. ``file``: the experiment file, for a workload
    of the user's own. Raises RunFolderError if it is no checkpoint, WorkloadError if its workload must not be used.
    """
    state = _read(checkpoint)
    facts = state.values.get("trained")
    if not isinstance(facts, dict):
        raise RunFolderError(f"{checkpoint}: does not name its workload; it was written by an earlier version")
    name = str(facts["workload"])
    own = name not in BUILTIN_WORKLOADS
    if own:
        _check_own(name, facts, file, no_user_code)
    elif no_user_code and facts["workload_options"].get("download"):
        raise WorkloadError("--no-user-code: the checkpoint's workload downloads its data (workload_options.download)")
    with import_path(file.resolve().parent) if own and file else nullcontext():
        return _evaluated(state, facts)


def _read(checkpoint: Path) -> State:
    """Return the state in a checkpoint's folder, or the newest one of a trial's folder."""
    here = checkpoint.resolve()
    numbers = files.epochs(here)
    folder, epoch = (here, numbers[0]) if numbers else (here.parent, _epoch(here))
    state = files.read(folder, epoch) if epoch else None
    if state is None:
        raise RunFolderError(
            f"{checkpoint}: no complete checkpoint; give RUN_FOLDER/checkpoints/TRIAL/epoch-N, or the trial's folder"
        )
    return state


def _epoch(folder: Path) -> int:
    number = folder.name.removeprefix("epoch-")
    return int(number) if folder.name.startswith("epoch-") and number.isdecimal() else 0


def _check_own(name: str, facts: dict[str, Any], file: Path | None, no_user_code: bool) -> None:
    """Raise WorkloadError unless the user's own workload may be imported, and is the one that was trained."""
    if no_user_code:
        raise WorkloadError(f"--no-user-code: the checkpoint is of the workload {name}, which is code of its own")
    if file is None:
        raise WorkloadError(f"the checkpoint is of the workload {name}: give the experiment file that names it, FILE")
    named = load_experiment(file).workload
    if named != name:
        raise WorkloadError(f"{file}: names the workload {named}; the checkpoint is of {name}")
    module = module_file(name.partition(":")[0], [str(file.resolve().parent), *sys.path])
    if module is None:
        raise WorkloadError(f"{file}: the module of the workload {name} is not beside it, nor on the import path")
    check_code(facts, module)


def _evaluated(state: State, facts: dict[str, Any]) -> dict[str, float]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    cell, seed = cell_of(facts, kind), int(facts["seed"])
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    ranks = Ranks(0, 1, 0, 0, "evaluate", "127.0.0.1", (device,))
    workload = workloads.build(cell)
    training = Training(cell, workload, seed, ranks)
    try:
        training.unwrapped.load_state_dict(state.model)
    except RuntimeError as error:
        raise WorkloadError(f"the checkpoint does not fit the workload's model: {error}") from error
    data = EpochData(cell, seed, ranks, *workload.datasets(), workloads.collate_of(workload))
    return Evaluator(training, data).evaluate(lambda: None)
