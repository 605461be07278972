"""Checkpoints on disk: one folder each, renamed into place when complete; safetensors and JSON, no pickle."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.train.checkpoint.state import State, Tensors

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
        save_file(_storable(getattr(state, part)), partial / f"{part}.safetensors")
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


def _storable(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors contiguous and without shared storage: safetensors rejects tied weights."""
    stored: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        shared = here.untyped_storage().data_ptr() in seen
        seen.add(here.untyped_storage().data_ptr())
        stored[name] = here.clone() if shared else here
    return stored


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk (fsync)."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
