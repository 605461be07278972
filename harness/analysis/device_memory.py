"""Peak memory of each GPU of a cell: under DataParallel the first one holds more than the others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pandas as pd

from harness.analysis.common import Row, Rows, Values, measured, order
from harness.record.frames import records
from harness.record.schema import DESCRIPTION, DEVICE_MEMORY, TRIAL_COLUMNS

KEYS = [column.name for column in TRIAL_COLUMNS]
PEAKS = ["allocated_bytes", "reserved_bytes"]


def device_memory(trials: pd.DataFrame, ranks: pd.DataFrame) -> pd.DataFrame:
    """Return one row a GPU of each cell, with its largest peak over the blocks; no rows without GPUs."""
    known = ranks[ranks["allocated_by_device"].notna()].sort_values([*KEYS, "rank"])
    rows = [row for _, trial in known.groupby(KEYS, sort=False) for row in _of_trial(records(trial))]
    if not rows:
        return DEVICE_MEMORY.frame([])
    cells = measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]]
    largest = pd.DataFrame(rows).merge(cells, on=KEYS).groupby(["cell_id", "gpu"], sort=False)
    made = [{**records(group.head(1))[0], **group[PEAKS].max().to_dict()} for _, group in largest]
    return DEVICE_MEMORY.frame({name: row[name] for name in DEVICE_MEMORY.names} for row in sorted(made, key=_order))


def _of_trial(ranks: Rows) -> Iterator[Values]:
    """Yield the GPUs of a trial in the order of ranks and of each rank's devices, numbered from 0."""
    numbers = count()
    for rank in ranks:
        texts = (rank["devices"], rank["allocated_by_device"], rank["reserved_by_device"])
        for name, allocated, reserved in zip(*(str(text).split(", ") for text in texts), strict=True):
            peaks = {"allocated_bytes": int(allocated), "reserved_bytes": int(reserved)}
            yield {
                **{key: rank[key] for key in KEYS},
                "rank": rank["rank"],
                "gpu": next(numbers),
                "name": name,
                **peaks,
            }


def _order(row: Row) -> tuple[object, ...]:
    return (*order(row), row["cell_id"], row["gpu"])
