"""What a checkpoint is of: enough to build its model and its validation data again, on one device."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.errors import WorkloadError
from harness.plan.cell import Cell

FIELDS = ("workload", "data", "model", "workload_options", "precision", "global_batch_size")


def trained_facts(cell: Cell, seed: int, workload: object) -> dict[str, object]:
    """Return the cell's workload and its options, and the hash of the file of a class of the user's own."""
    own = cell.workload not in BUILTIN_WORKLOADS
    code = _hash_of(Path(inspect.getfile(type(workload)))) if own else None
    return {**{name: getattr(cell, name) for name in FIELDS}, "seed": seed, "code": code}


def cell_of(facts: Mapping[str, Any], device: str) -> Cell:
    """Return the cell on one device that evaluates what a checkpoint holds; its optimizer takes no step."""
    batch = int(facts["global_batch_size"])
    cell = Cell(str(facts["workload"]), facts["data"], facts["model"], "single", device, 1, 1, "strong", batch, batch)
    given = {"workload_options": dict(facts["workload_options"]), "precision": str(facts["precision"])}
    return Cell(**{**vars(cell), **given, "optimizer": {"name": "SGD", "lr": 0.0}})


def check_code(facts: Mapping[str, Any], file: Path) -> None:
    """Raise WorkloadError unless the file with the user's class is the one that the checkpoint was trained with."""
    if facts["code"] != (now := _hash_of(file)):
        raise WorkloadError(
            f"{file}: is not the code that the checkpoint was trained with: its hash was {str(facts['code'])[:12]} and "
            f"is {now[:12]}; give the experiment file beside the recorded one"
        )


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
