"""Checkpoints on disk, without pickle: when they are written, and which one a lost trial resumes from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harness.errors import WorkloadError
from harness.train.checkpoint.state import State, Tensors, capture, restore
from harness.train.ranks import Ranks
from harness.train.training import Training

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

    def resume(self) -> Mapping[str, Any]:
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
