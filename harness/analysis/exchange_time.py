"""The time that the exchanges of a step need at the measured speed of their collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.plan.comparison import backend_of
from harness.record.frames import records

PART_OF = {"all_reduce": "exposed communication", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
"""The part of a waterfall that waits for each collective."""


class ExchangeTime(NamedTuple):
    """The exchange of one step: its bytes, and its seconds at the measured latency and bandwidth, without overlap."""

    size_bytes: int
    seconds: float


Needed = Mapping[tuple[str, str], ExchangeTime]
"""By cell and part of the waterfall."""


def exchange_times(exchanges: pd.DataFrame, collectives: pd.DataFrame) -> Needed:
    """Return what each recorded exchange needs, if its collective was measured on as many devices and nodes."""
    measured: dict[tuple[object, ...], list[tuple[int, float]]] = {}
    for row in records(collectives):
        placement = row["backend"], row["devices"], row["nodes"], row["operation"]
        measured.setdefault(placement, []).append((int(row["size_bytes"]), float(row["time_s"])))
    sizes: dict[tuple[str, str], list[int]] = {}
    known: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in records(exchanges):
        placement = backend_of(row), row["devices"], row["nodes"], row["operation"]
        if placement in measured:
            key = row["cell_id"], PART_OF[row["operation"]]
            sizes.setdefault(key, []).append(int(row["size_bytes"]))
            known[key] = measured[placement]
    return {
        key: ExchangeTime(sum(of_cell), float(seconds_of(of_cell, known[key]).sum())) for key, of_cell in sizes.items()
    }


def seconds_of(sizes: Sequence[int], measured: Sequence[tuple[int, float]]) -> npt.NDArray[np.float64]:
    """Return the time of a collective of each size, from measured sizes (bytes) and seconds.

    Between two of them on logarithmic axes; below the smallest that one's, which is latency; beyond the largest in
    proportion to the size.
    """
    at, seconds = np.array(sorted(measured), dtype=float).T
    between = np.exp(np.interp(np.log(sizes), np.log(at), np.log(seconds)))
    found: npt.NDArray[np.float64] = between * np.maximum(1.0, np.array(sizes) / at[-1])
    return found
