"""estimate.json: the time that a run was expected to take, written before it began."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

from harness.record.folder import RunFolder
from harness.record.reading import naming_file, read_object, validated
from harness.system.files import replace_text

Basis = Literal["earlier run", "lower bound", "unknown"]
"""Where an estimate is from; a lower bound also if only some of its trials are in an earlier run."""
Bound = Literal["about", "at least", "at most"]


@dataclass(frozen=True)
class PartTime:
    """The time of one part of a run, estimated or actual: a cell, a purpose of diagnostic trials, what is outside.

    ``trials``: their number, of worker groups that of the groups. ``device_s``: seconds times the devices that trials
    occupy. ``basis``: None if it is no estimate. None: not known.
    """

    part: str
    cell_id: str | None
    label: str
    trials: int = 0
    seconds: float | None = None
    device_s: float | None = None
    energy_j: float | None = None
    basis: Basis | None = None


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run on a machine of ``devices``, of which at most ``at_once`` work at once.

    ``earlier``: the run folder that it is from; None if it is a lower bound. ``bound``: that of the sum of its parts.
    """

    earlier: str | None
    devices: int
    at_once: int
    bound: Bound
    parts: list[PartTime]

    @property
    def seconds(self) -> float:
        """The sum of the known parts."""
        return sum(part.seconds or 0.0 for part in self.parts)


_ESTIMATE = TypeAdapter(Estimate)


def write_estimate(folder: RunFolder, estimate: Estimate) -> None:
    """Write estimate.json of a new run; raises WriteError."""
    replace_text(folder.path / "estimate.json", json.dumps(asdict(estimate), indent=1))


def read_estimate(folder: RunFolder) -> Estimate | None:
    """Return the estimate of a run; None if it recorded none. Raises RunFolderError if the file is damaged."""
    path = folder.path / "estimate.json"
    if not path.exists():
        return None
    content = read_object(path)
    with naming_file(path):
        return validated(_ESTIMATE, content)
