"""Collectives of another measurement: of ``harness doctor FILE --links``, for placements and sizes that a run lacks."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from harness.analysis.links import collectives
from harness.errors import PredictionError
from harness.record.folder import RunFolder
from harness.record.schema import COLLECTIVES

FORMATS = (".csv", ".parquet")


def read_links(path: Path, own: pd.DataFrame) -> pd.DataFrame:
    """Return the collectives in a run folder or a table's file.

    Raises PredictionError if there are none, or if they are not of devices and a backend as the run's ``own``.
    """
    found = collectives(RunFolder.open(path).lines()) if path.is_dir() else _read_table(path)
    if found.empty:
        raise PredictionError(f"--links: {path} has no collectives; measure them: harness doctor FILE --links")
    for name, what in (("device_model", "devices"), ("backend", "backend")):
        here, there = ({*frame[name].dropna()} for frame in (own, found))
        if here and there and not here & there:
            raise PredictionError(
                f"--links: the {what} of {path} are {_text(there)}, those of the run {_text(here)}; "
                "give links of the same kind of machine"
            )
    return found


def _read_table(path: Path) -> pd.DataFrame:
    if path.suffix not in FORMATS or not path.is_file():
        raise PredictionError(
            f"--links: got {path}; allowed: a run folder, or its tables/collectives.csv or collectives.parquet"
        )
    try:
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        needed = ("operation", "tier", "devices", "nodes", "size_bytes", "time_s", "device_model", "backend")
        if missing := [name for name in needed if name not in frame.columns]:
            raise PredictionError(f"--links: {path} lacks the columns {', '.join(missing)}; give a table collectives")
        return COLLECTIVES.typed(frame)
    except (OSError, ValueError, TypeError) as error:
        raise PredictionError(
            f"--links: {path} cannot be read as a table: {' '.join(str(error).split())[:200]}"
        ) from None


def _text(values: set[str]) -> str:
    return ", ".join(sorted(values))
