"""GPUs by cell: NVML readings, memory of each, and measured links and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import pandas as pd

from harness.analysis.common import KEYS, AnyRow, Lines, Values, columns_of, measured, order, rows_of, trial_key
from harness.analysis.phases import timings
from harness.analysis.stats import geometric_mean
from harness.plan.rows import LinkOperation
from harness.record.schema import COLLECTIVES, DESCRIPTION, DEVICE_MEMORY, GPUS, LINKS

STATES = ["gpu_utilisation", "power_w", "sm_clock_fraction", "temperature_c", "throttled"]
ENERGY = ["energy_j", "samples_per_joule"]


def gpus(trials: pd.DataFrame, ranks: pd.DataFrame, windows: pd.DataFrame, lines: Lines) -> pd.DataFrame:
    """Return one row a cell whose GPUs gave any reading, or were profiled; no rows without GPUs."""
    busy = _busy(trials, windows, lines)
    readings = ranks[[*KEYS, *STATES, *ENERGY]]
    known = readings[readings[[*STATES, *ENERGY]].notna().any(axis=1)][KEYS].drop_duplicates()
    kept = measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]]
    kept = kept.merge(known, on=KEYS, how="left", indicator=True)
    kept = kept[(kept.pop("_merge") == "both") | kept["cell_id"].isin(list(busy))]
    groups = readings.merge(kept, on=KEYS).groupby("cell_id", sort=False)
    rows = [{**_row(group), **busy.get(str(cell_id), {})} for cell_id, group in groups]
    return GPUS.frame(sorted(rows, key=order))


def _busy(trials: pd.DataFrame, windows: pd.DataFrame, lines: Lines) -> dict[str, Values]:
    """Return by cell the busy seconds of its profiles, the mean over blocks, and their share of its timed step.

    Profiled steps are longer than timed ones by what the profiler costs the host; kernels are not.
    """
    profiled: dict[str, list[float]] = {}
    for line in {line["trial_id"]: line for line in lines if line["outcome"] == "ok"}.values():
        if (seconds := line["facts"].get("busy_s")) is not None:
            profiled.setdefault(line["cell_id"], []).append(seconds)
    if not profiled:
        return {}
    timed, steps = timings(windows), dict[str, list[float]]()
    for row in rows_of(measured(trials)):
        if timing := timed.get(trial_key(row)):
            steps.setdefault(row.cell_id, []).append(timing.step_mean_s)
    return {
        cell_id: {"busy_s": fmean(each), "busy": min(1.0, fmean(each) / fmean(steps[cell_id]))}
        for cell_id, each in profiled.items()
        if cell_id in steps
    }


def _row(ranks: pd.DataFrame) -> Values:
    (first,) = rows_of(ranks.head(1))
    held = {why for text in ranks["throttled"].dropna() for why in text.split(", ") if why}
    efficiencies = [_samples_per_joule(trial) for _, trial in ranks.groupby(KEYS, sort=False)]
    known = [value for value in efficiencies if value is not None]
    return {
        **columns_of(first, "cell_id", *DESCRIPTION),
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


OF_GPUS = {"name": "devices", "allocated_bytes": "allocated_by_device", "reserved_bytes": "reserved_by_device"}
"""Columns of a GPU, and of its rank, which has the values of all of its GPUs as text: '1024, 512'."""
PEAKS = ["allocated_bytes", "reserved_bytes"]


def device_memory(trials: pd.DataFrame, ranks: pd.DataFrame) -> pd.DataFrame:
    """Return one row a GPU of each cell, with its largest peak over the blocks; no rows without GPUs.

    The GPUs of a trial are numbered from 0 in the order of ranks and of each rank's devices.
    """
    known = ranks[ranks["allocated_by_device"].notna()].sort_values([*KEYS, "rank"])
    if known.empty:
        return DEVICE_MEMORY.frame([])
    texts = {of_gpu: known[of_rank].str.split(", ") for of_gpu, of_rank in OF_GPUS.items()}
    gpus = known[[*KEYS, "rank"]].assign(**texts).explode([*OF_GPUS], ignore_index=True)
    gpus["gpu"] = gpus.groupby(KEYS).cumcount()
    gpus[PEAKS] = gpus[PEAKS].astype("int64")
    found = gpus.merge(measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]], on=KEYS)
    found[PEAKS] = found.groupby(["cell_id", "gpu"])[PEAKS].transform("max")
    rows = rows_of(found.drop_duplicates(["cell_id", "gpu"])[DEVICE_MEMORY.names])
    return DEVICE_MEMORY.frame(sorted(rows, key=lambda row: (*order(row), row["cell_id"], row["gpu"])))


PLACEMENT = ("trial_id", "device", "device_ids", "devices", "nodes")
TRANSFERS: tuple[LinkOperation, ...] = ("copy", "send_receive")


def bus_factor(operation: LinkOperation, devices: int) -> float:
    """Return the bus bandwidth over the algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there).

    All-reduce of n devices: 2(n-1)/n; all-gather and reduce-scatter: (n-1)/n; from one device to another: 1.
    """
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(operation)
    return rounds * (devices - 1) / devices if rounds else 1.0


def links(lines: Lines) -> pd.DataFrame:
    """Return one row a pair of devices and size, of each placement."""
    return LINKS.frame(row for row in _measured(lines) if row["operation"] in TRANSFERS)


def collectives(lines: Lines) -> pd.DataFrame:
    """Return one row a collective and size, of each placement."""
    return COLLECTIVES.frame(
        {name: value for name, value in row.items() if name not in ("source", "target", "link")}
        for row in _measured(lines)
        if row["operation"] not in TRANSFERS
    )


def _measured(lines: Lines) -> Iterator[AnyRow]:
    """Yield the rows of the latest measurement of each placement, with the placement and the bandwidths."""
    latest = {line["trial_id"]: line for line in lines if line.get("links")}
    for line in latest.values():
        placement = {name: line.get(name) for name in PLACEMENT}
        model = line["ranks"][0].get("device_model") if line["ranks"] else None
        for row in line["links"] or ():
            bandwidth = row["size_bytes"] / row["time_s"] if row["time_s"] > 0 else None
            bus = None if bandwidth is None else bus_factor(row["operation"], line["devices"]) * bandwidth
            speeds = {"algorithm_bytes_per_s": bandwidth, "bus_bytes_per_s": bus}
            yield {**placement, "device_model": model, **row, **speeds}
