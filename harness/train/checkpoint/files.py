"""Checkpoints on disk: a folder each, whole or not there; tensors as safetensors, the rest as JSON, no pickles."""

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
"""The newest, and one before it in case that the newest cannot be read."""
_NAME = re.compile(r"epoch-(\d+)")


def write(folder: Path, epoch: int, state: State, values: Mapping[str, object]) -> Path:
    """Writes a checkpoint under another name, waits until it is on disk, renames it; removes what is too old."""
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
    """The epochs that there are checkpoints of, newest first."""
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]) for name in names if name), reverse=True)


def read(folder: Path, epoch: int) -> State | None:
    """What was written after an epoch; None where it is not whole or cannot be read."""
    here = folder / f"epoch-{epoch}"
    try:
        model, optimizer, rng = (load_file(here / f"{part}.safetensors") for part in PARTS)
        values = json.loads((here / VALUES).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError):
        return None
    return State(model, optimizer, rng, values)


def _storable(tensors: Mapping[str, Tensor]) -> Tensors:
    """Each tensor dense and in memory of its own: safetensors refuses tied weights that share theirs."""
    stored: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        shared = here.untyped_storage().data_ptr() in seen
        seen.add(here.untyped_storage().data_ptr())
        stored[name] = here.clone() if shared else here
    return stored


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
