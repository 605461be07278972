"""Checkpoints, without pickle: their state, their files, from which a trial resumes, and the training they are of."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import abspath
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config.axes import PrecisionName
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.strategy_traits import BASE_STRATEGY
from harness.config.values import PlainValue, Seed
from harness.errors import RunFolderError, WorkloadError
from harness.plan.cell import Cell
from harness.plan.rows import Json
from harness.system.user_code import module_file
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads import module_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """Tensors on the host by name; all other values as JSON.

    ``model``: parameters and buffers by their names in the bare model. ``optimizer``: by '<parameter>/<entry>'.
    ``rng``: states of torch's generators, by 'rank<n>.cpu' and 'rank<n>.cuda<i>'; Python's are among the values.
    """

    model: Tensors
    optimizer: Tensors
    rng: Tensors
    values: Json


def capture(training: Training, ranks: Ranks) -> State:
    """Return the state after a step, complete on rank 0; other ranks' may be empty. Every rank must call this."""
    from torch.distributed.checkpoint import state_dict as dcp  # takes most of a second

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters = dcp.get_model_state_dict(training.unwrapped, options=options)
    optimizer = training.strategy.optimizer_state(training.model, training.optimizer)
    own = {"cpu": torch.get_rng_state()}
    own |= {f"cuda{i}": torch.cuda.get_rng_state(device) for i, device in _gpus(ranks.devices)}
    generators = ranks.gather_to_first((own, random.getstate()))
    tensors, values = _parted(optimizer)
    rng = {f"rank{rank}.{name}": state for rank, (states, _) in enumerate(generators) for name, state in states.items()}
    values["scaler"] = training.scaler.state_dict()
    values["python_rng"] = [state for _, state in generators]
    whole = {name: value for name, value in parameters.items() if isinstance(value, Tensor)}
    return State(whole, tensors, rng, values)


def restore(state: State, training: Training, ranks: Ranks) -> None:
    """Restore a state, whatever strategy and number of ranks it is from. Every rank must call this.

    A rank whose generators the state lacks keeps its own.
    """
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = _joined(state)
    if state.optimizer:  # the optimizer first: torch makes a new one take a step, with zero gradients
        training.strategy.load_optimizer_state(training.model, training.optimizer, kept)
    for group, values in zip(training.optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
    if scale := state.values.get("scaler"):
        training.scaler.load_state_dict(scale)
    dcp.set_model_state_dict(training.unwrapped, dict(state.model), options=options)
    prefix = f"rank{ranks.rank}."
    states = {name.removeprefix(prefix): value for name, value in state.rng.items() if name.startswith(prefix)}
    if states:
        torch.set_rng_state(states["cpu"])
        for i, device in _gpus(ranks.devices):
            if f"cuda{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda{i}"], device)
        version, numbers, gauss = state.values["python_rng"][ranks.rank]
        random.setstate((version, tuple(numbers), gauss))


def _parted(optimizer: Json) -> tuple[Tensors, Json]:
    """Split an optimizer's state dict into its tensors and all other values; tuples become mappings for JSON."""
    tensors: Tensors = {}
    scalars: dict[str, Json] = {}
    for parameter, entries in optimizer.get("state", {}).items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{parameter}/{name}"] = value
            else:
                scalars.setdefault(parameter, {})[name] = value
    groups = [
        {name: {"tuple": list(value)} if isinstance(value, tuple) else value for name, value in group.items()}
        for group in optimizer.get("param_groups", [])
    ]
    return tensors, {"optimizer": {"state": scalars, "param_groups": groups}}


def _joined(state: State) -> Json:
    """Return the optimizer's state dict in torch's layout."""
    kept = state.values["optimizer"]
    groups = [
        {name: tuple(value["tuple"]) if isinstance(value, dict) else value for name, value in group.items()}
        for group in kept["param_groups"]
    ]
    entries: dict[str, Json] = {name: {} for group in groups for name in group["params"]}
    for parameter, scalars in kept["state"].items():
        entries[parameter].update(scalars)
    for key, tensor in state.optimizer.items():
        parameter, _, name = key.rpartition("/")
        entries[parameter][name] = tensor
    return {"state": {name: entry for name, entry in entries.items() if entry}, "param_groups": groups}


def _gpus(devices: Sequence[torch.device]) -> Iterator[tuple[int, torch.device]]:
    return ((i, device) for i, device in enumerate(devices) if device.type == "cuda")


PARTS = ("model", "optimizer", "rng")
VALUES = "state.json"
KEPT = 2
"""The number of checkpoints kept: the newest, and one more in case the newest cannot be read."""
_NAME = re.compile(r"epoch-(\d+)")


def write(folder: Path, epoch: int, state: State, values: Mapping[str, object]) -> Path:
    """Write a checkpoint durably under a temporary name, rename it, and remove old ones; return its folder."""
    target, partial = folder / f"epoch-{epoch}", folder / "partial"
    folder.mkdir(parents=True, exist_ok=True)
    for old in (partial, target):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    for part in PARTS:
        stored: Tensors = {}
        seen: set[int] = set()
        for name, tensor in getattr(state, part).items():
            here = tensor.detach().cpu().contiguous()
            shared = here.untyped_storage().data_ptr() in seen
            seen.add(here.untyped_storage().data_ptr())
            stored[name] = here.clone() if shared else here
        save_file(stored, partial / f"{part}.safetensors")
    (partial / VALUES).write_text(json.dumps({**state.values, **values}), encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _sync(path)
    os.rename(partial, target)
    _sync(folder)
    for number in epochs(folder)[KEPT:]:
        shutil.rmtree(folder / f"epoch-{number}", ignore_errors=True)
    return target


def epochs(folder: Path) -> list[int]:
    """Return the epochs that have a checkpoint, newest first."""
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]) for name in names if name), reverse=True)


def read(folder: Path, epoch: int) -> State | None:
    """Return the checkpoint of an epoch; None if it is incomplete or cannot be read."""
    here = folder / f"epoch-{epoch}"
    try:
        model, optimizer, rng = (load_file(here / f"{part}.safetensors") for part in PARTS)
        values = json.loads((here / VALUES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, SafetensorError):
        return None
    return State(model, optimizer, rng, values) if isinstance(values, dict) else None


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk (fsync)."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@dataclass(frozen=True)
class CheckpointManager:
    """Writes a checkpoint after every ``every`` epochs and the last one, and resumes from the newest complete one.

    ``folder`` belongs to this trial only. All ranks call each method together; only rank 0 writes.
    ``trained``: what the model is of, for an evaluation.
    """

    folder: Path
    every: int
    training: Training
    ranks: Ranks
    trained: Mapping[str, object] = field(default_factory=dict)

    def save(self, epoch: int, values: Mapping[str, object], *, last: bool) -> None:
        """Write a checkpoint of this epoch if one is due; raise OSError if it cannot be written."""
        if epoch % self.every and not last:
            return
        state = capture(self.training, self.ranks)
        if self.ranks.first:
            facts = {"torch": torch.__version__, "epoch": epoch, "trained": dict(self.trained)}
            write(self.folder, epoch, state, {**facts, **values})
        self.ranks.barrier()  # no rank continues before the checkpoint is on disk

    def resume(self) -> Json:
        """Restore the newest complete checkpoint and return its plain values; return {} if there is none.

        Raise WorkloadError if a rank cannot read the checkpoint that rank 0 found.
        """
        epoch: int | None = None
        if self.ranks.first:
            epoch = next((number for number in epochs(self.folder) if read(self.folder, number)), None)
        epoch = self.ranks.broadcast(epoch)
        if epoch is None:
            return {}
        state = read(self.folder, epoch)
        if state is None:
            raise WorkloadError(
                f"checkpoint.folder: {self.folder} has no complete checkpoint of epoch {epoch} on node "
                f"{self.ranks.address}, but has one on the node of rank 0; give a path that all nodes share"
            )
        restore(state, self.training, self.ranks)
        return state.values


Count = Annotated[int, Field(ge=1)]
INSTALLED = ("site-packages", "dist-packages")
"""Names of folders whose other packages are not the user's own."""


class Trained(BaseModel):
    """A checkpoint's workload, its options and what it was trained with.

    ``micro_batch_size``: samples in one forward pass on one device. ``code``: the hash of each module of the user's
    own, by name; None for a built-in workload.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    workload: str
    data: str | None
    model: str | None
    workload_options: dict[str, PlainValue]
    precision: PrecisionName
    global_batch_size: Count
    micro_batch_size: Count
    seed: Seed
    code: dict[str, str] | None

    @property
    def own(self) -> bool:
        """Whether the workload is of the user's own."""
        return self.workload not in BUILTIN_WORKLOADS


def trained_facts(cell: Cell, seed: int) -> dict[str, object]:
    """Return the cell's workload and its options, and the hashes of the code of a workload of the user's own."""
    return {
        "workload": cell.workload,
        "data": cell.data,
        "model": cell.model,
        "workload_options": dict(cell.workload_options),
        "precision": cell.precision,
        "global_batch_size": cell.global_batch_size,
        "micro_batch_size": math.ceil(cell.global_batch_size / (cell.devices * cell.micro_batches)),
        "seed": seed,
        "code": None if cell.workload in BUILTIN_WORKLOADS else own_code(module_of(cell.workload)),
    }


def trained_of(values: Mapping[str, object], place: str) -> Trained:
    """Return what a checkpoint's values say of its training; raise RunFolderError if it does not say it, or not so."""
    facts = values.get("trained")
    if facts is None:
        raise RunFolderError(f"{place}: does not name its workload")
    try:
        return Trained.model_validate(facts)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("trained", *first["loc"])))
        raise RunFolderError(
            f"{place}: state.json is not as it was written: {where}: {first['msg']}; give another checkpoint"
        ) from None


def cell_of(trained: Trained, device: str) -> Cell:
    """Return the cell on one device that evaluates what a checkpoint holds; its optimizer takes no step."""
    batch = trained.micro_batch_size
    named = (trained.workload, trained.data, trained.model)
    return Cell(
        *(*named, BASE_STRATEGY, device, 1, 1, "strong", batch, batch),
        precision=trained.precision,
        workload_options=trained.workload_options,
        optimizer={"name": "SGD", "lr": 0.0},
    )


def own_code(module: str) -> dict[str, str]:
    """Return the hash of each loaded module of the user's own, by name.

    These are the module and all others that were imported from the folder in which it, or its outermost package, lies;
    of an installed package its own modules. What is imported later, such as inside a function, is not among them.
    """
    home = _home(module, _file(module))
    if home is None:
        return {}
    outermost = module.partition(".")[0]
    apart = home.name in INSTALLED
    tops = {name: name.partition(".")[0] for name in list(sys.modules)}
    names = [name for name, top in tops.items() if top == outermost or not (apart or top == "harness")]
    files = {name: _file(name) for name in names}
    return {name: _hash_of(file) for name, file in files.items() if file and _home(name, file) == home}


def check_code(trained: Trained, file: Path) -> None:
    """Raise WorkloadError unless the modules of the user's own are those that the checkpoint was trained with.

    ``file``: the experiment file, in whose folder they are looked for first. Nothing is imported. Compared are the
    modules that were loaded when the training began.
    """
    module = module_of(trained.workload)
    recorded = trained.code or {}
    for name in (module, *recorded):
        place = module_file(name, [str(file.parent), *sys.path])
        if place is None:
            raise WorkloadError(
                f"{file}: the module {name}, which the checkpoint of the workload {trained.workload} was trained with, "
                "is not beside it, nor on the import path"
            )
        if recorded.get(name) != (now := _hash_of(place)):
            raise WorkloadError(
                f"{place}: is not the code that the checkpoint was trained with: its hash was "
                f"{str(recorded.get(name))[:12]} and is {now[:12]}; give the experiment file beside the recorded one"
            )


def _file(name: str) -> Path | None:
    """Return the file of a loaded module; None if it has none."""
    found = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")  # no attribute that a module would import
    file = Path(abspath(found)) if isinstance(found, str) else None
    return file if file and file.is_file() else None


def _home(name: str, file: Path | None) -> Path | None:
    """Return the folder on the import path from which a module's file was imported; None for a file of another name."""
    if file is None:
        return None
    parts: Sequence[str] = name.split(".")
    whole = file.parent if file.stem == "__init__" else file.with_suffix("")
    return whole.parents[len(parts) - 1] if whole.parts[-len(parts) :] == tuple(parts) else None


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
