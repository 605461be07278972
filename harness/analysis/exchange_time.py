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
    for row in records(collectives[collectives["time_s"] > 0]):
        placement = row["backend"], row["devices"], row["nodes"], row["operation"]
        measured.setdefault(placement, []).append((int(row["size_bytes"]), float(row["time_s"])))
    found: dict[tuple[str, str], ExchangeTime] = {}
    for row in records(exchanges):
        if times := measured.get((backend_of(row), row["devices"], row["nodes"], row["operation"])):
            key, size = (row["cell_id"], PART_OF[row["operation"]]), int(row["size_bytes"])
            before = found.get(key, ExchangeTime(0, 0.0))
            found[key] = ExchangeTime(before.size_bytes + size, before.seconds + float(seconds_of([size], times)[0]))
    return found


def seconds_of(sizes: Sequence[int], measured: Sequence[tuple[int, float]]) -> npt.NDArray[np.float64]:
    """Return the time of a collective of each size, from measured sizes (bytes) and seconds.

    Between two of them on logarithmic axes; below the smallest that one's, which is latency; beyond the largest in
    proportion to the size.
    """
    at, seconds = np.array(sorted(measured), dtype=float).T
    between = np.exp(np.interp(np.log(sizes), np.log(at), np.log(seconds)))
    found: npt.NDArray[np.float64] = between * np.maximum(1.0, np.array(sizes) / at[-1])
    return found
