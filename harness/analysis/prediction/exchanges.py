"""The recorded exchanges of a step, as a table."""

from __future__ import annotations

import pandas as pd

from harness.analysis.common import Lines
from harness.record.frames import records
from harness.record.schema import DESCRIPTION, EXCHANGES


def recorded_exchanges(lines: Lines, trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row a collective of each cell: those of the latest trial that recorded them."""
    latest = {line["cell_id"]: line for line in lines if line.get("exchanges")}
    if not latest:
        return EXCHANGES.frame([])
    described = trials[["cell_id", *DESCRIPTION]].drop_duplicates("cell_id")
    cells = {row["cell_id"]: row for row in records(described)}
    return EXCHANGES.frame(
        {**cells[cell_id], "trial_id": line["trial_id"], **exchange}
        for cell_id, line in latest.items()
        for exchange in line["exchanges"]
    )
