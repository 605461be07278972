"""The validation metrics of a saved model: a checkpoint of a convergence trial, on one device."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import torch

from harness.config.load import load_experiment
from harness.errors import RunFolderError, WorkloadError, cause_of
from harness.measure.convergence import Evaluator
from harness.measure.stepper import TrainingData
from harness.run.prepare import import_path
from harness.train import checkpoint as checkpoints
from harness.train import workloads
from harness.train.checkpoint import State, Trained, cell_of, check_code, trained_of
from harness.train.ranks import Ranks
from harness.train.training import Training


def evaluate(checkpoint: Path, file: Path | None = None, *, no_user_code: bool = False) -> dict[str, float]:
    """Return the validation metrics of the model in a checkpoint, each sample exactly once.

    ``checkpoint``: a folder epoch-N, or that of its trial for the newest. ``file``: the experiment file, for a workload
    of the user's own. Raises RunFolderError if it is no checkpoint, WorkloadError if its workload must not be used.
    """
    try:
        state = _read(checkpoint)
    except OSError as error:
        raise RunFolderError(f"{checkpoint}: cannot be read: {cause_of(error)}") from None
    trained = trained_of(state.values, str(checkpoint))
    if trained.own:
        _check_own(trained, file, no_user_code)
    elif no_user_code and trained.workload_options.get("download"):
        raise WorkloadError("--no-user-code: the checkpoint's workload downloads its data (workload_options.download)")
    with import_path(file.resolve().parent) if trained.own and file else nullcontext():
        return _metrics(state, trained)


def _read(checkpoint: Path) -> State:
    """Return the state in a checkpoint's folder, or the newest one of a trial's folder."""
    here = checkpoint.resolve()
    numbers = checkpoints.epochs(here)
    named = re.fullmatch(r"epoch-([0-9]+)", here.name)
    folder, epoch = (here, numbers[0]) if numbers else (here.parent, int(named[1]) if named else 0)
    state = checkpoints.read(folder, epoch) if epoch else None
    if state is None:
        raise RunFolderError(
            f"{checkpoint}: no complete checkpoint; give RUN_FOLDER/checkpoints/TRIAL/epoch-N, or the trial's folder"
        )
    return state


def _check_own(trained: Trained, file: Path | None, no_user_code: bool) -> None:
    """Raise WorkloadError unless the user's own workload may be imported, and is the one that was trained."""
    name = trained.workload
    if no_user_code:
        raise WorkloadError(f"--no-user-code: the checkpoint is of the workload {name}, which is code of its own")
    if file is None:
        raise WorkloadError(f"the checkpoint is of the workload {name}: give the experiment file that names it, FILE")
    named = load_experiment(file).workload
    if named != name:
        raise WorkloadError(f"{file}: names the workload {named}; the checkpoint is of {name}")
    check_code(trained, file.resolve())


def _metrics(state: State, trained: Trained) -> dict[str, float]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cell = cell_of(trained, device.type)
    ranks = Ranks(0, 1, 0, 0, "evaluate", "127.0.0.1", (device,))
    try:
        workload = workloads.build(cell)
        training = Training(cell, workload, trained.seed, ranks)
        try:
            training.unwrapped.load_state_dict(state.model)
        except RuntimeError as error:
            raise WorkloadError(f"the checkpoint does not fit the workload's model: {error}") from error
        data = TrainingData(cell, trained.seed, ranks, *workloads.as_datasets(workload.datasets()), workload)
        return Evaluator(training, data, lambda: None).evaluate()
    except torch.OutOfMemoryError as error:
        raise WorkloadError(
            f"the model does not fit into the memory of one device with a batch of {cell.global_batch_size}; evaluate "
            f"on a device with more: {error}"
        ) from error
