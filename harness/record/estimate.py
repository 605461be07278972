"""estimate.json: the time that a run was expected to take, written before it began, by which the preview is graded."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from harness.record.folder import RunFolder
from harness.record.reading import naming_file, read_object, validated
from harness.system.files import replace_text

Basis = Literal["earlier run", "lower bound", "unknown"]
"""Where an estimate is from; a lower bound also if only some of its trials are in an earlier run."""
Bound = Literal["about", "at least", "at most"]


class EstimatedPart(TypedDict):
    """The time of one part of a run: a cell, a kind of diagnostic trials, or what is outside of trials.

    ``seconds`` is None if nothing is known; ``device_s``: seconds times the devices that trials occupy.
    """

    part: str
    cell_id: str | None
    label: str
    devices: int | None
    trials: int
    seconds: float | None
    device_s: float | None
    energy_j: float | None
    basis: Basis


class Estimate(TypedDict):
    """The estimate of a run on a machine of ``devices``, of which at most ``at_once`` work at once.

    ``earlier``: the run folder that it is from; None if it is a lower bound. ``bound``: that of the sum of its parts.
    """

    earlier: str | None
    devices: int
    at_once: int
    bound: Bound
    parts: list[EstimatedPart]


_ESTIMATE = TypeAdapter(Estimate)


def write_estimate(folder: RunFolder, estimate: Estimate) -> None:
    """Write estimate.json of a new run; raises WriteError."""
    replace_text(folder.path / "estimate.json", json.dumps(estimate, indent=1))


def read_estimate(folder: RunFolder) -> Estimate | None:
    """Return the estimate of a run; None if it recorded none. Raises RunFolderError if the file is damaged."""
    path = folder.path / "estimate.json"
    if not path.exists():
        return None
    content = read_object(path)
    with naming_file(path):
        return validated(_ESTIMATE, content)
