"""The training that a checkpoint belongs to: enough to rebuild its model and validation data on one device."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from os.path import abspath
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.config.axes import PrecisionName
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.config.strategy_traits import BASE_STRATEGY
from harness.config.values import PlainValue, Seed
from harness.errors import RunFolderError, WorkloadError
from harness.plan.cell import Cell
from harness.system.user_code import module_file

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
        "code": None if cell.workload in BUILTIN_WORKLOADS else own_code(_module(cell.workload)),
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
    module = _module(trained.workload)
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


def _module(workload: str) -> str:
    return workload.partition(":")[0]


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
