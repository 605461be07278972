"""NVML readings of the GPUs during timed windows, by cell."""

from __future__ import annotations

import pandas as pd

from harness.analysis.common import Values, measured, order
from harness.analysis.stats import geometric_mean
from harness.record.frames import records
from harness.record.schema import DESCRIPTION, GPUS, TRIAL_COLUMNS

KEYS = [column.name for column in TRIAL_COLUMNS]
STATES = ["gpu_utilisation", "power_w", "sm_clock_fraction", "temperature_c", "throttled"]
ENERGY = ["energy_j", "samples_per_joule"]


def gpus(trials: pd.DataFrame, ranks: pd.DataFrame) -> pd.DataFrame:
    """Return one row a cell whose GPUs gave any reading; no rows without GPUs."""
    readings = ranks[[*KEYS, *STATES, *ENERGY]]
    known = readings[readings[[*STATES, *ENERGY]].notna().any(axis=1)][KEYS].drop_duplicates()
    kept = measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]].merge(known, on=KEYS)
    rows = [_row(group) for _, group in readings.merge(kept, on=KEYS).groupby("cell_id", sort=False)]
    return GPUS.frame(sorted(rows, key=order))


def _row(ranks: pd.DataFrame) -> Values:
    first = records(ranks.head(1))[0]
    held = {why for text in ranks["throttled"].dropna() for why in text.split(", ") if why}
    efficiencies = [_samples_per_joule(trial) for _, trial in ranks.groupby(KEYS, sort=False)]
    known = [value for value in efficiencies if value is not None]
    return {
        **{name: first[name] for name in ("cell_id", *DESCRIPTION)},
        "blocks": len(efficiencies),
        "gpu_utilisation": ranks["gpu_utilisation"].mean(),
        "power_w": ranks["power_w"].mean(),
        "sm_clock_fraction": ranks["sm_clock_fraction"].min(),
        "temperature_c": ranks["temperature_c"].max(),
        "throttled": ", ".join(sorted(held)) if held or ranks["throttled"].notna().all() else None,
        "samples_per_joule": geometric_mean(known).value if len(known) == len(efficiencies) else None,
    }


def _samples_per_joule(trial: pd.DataFrame) -> float | None:
    """Return all ranks' samples over all GPUs' energy; None if the energy of a rank is not known."""
    known = trial[ENERGY].astype("Float64")
    if known.isna().any(axis=None):
        return None
    return float((known["energy_j"] * known["samples_per_joule"]).sum() / known["energy_j"].sum())
