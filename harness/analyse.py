"""What was recorded -> the tables that a person reads. Pure: rows and frames in, frames out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.schema import AXES, CELLS, CONVERGENCE, OUTCOMES, RANKS, SCALING, TRIALS, WINDOWS
from harness.stats import Estimate, geometric_mean, paired_ratio

Lines = Sequence[Mapping[str, Any]]
STRATEGIES = ("single", "dp", "ddp", "fsdp")
"""In the order in which they are shown."""
FAMILY = tuple(axis for axis in AXES if axis not in ("devices", "nodes", "per_device_batch_size", "global_batch_size"))
"""What cells share that differ in their device count alone, besides the batch that their scaling holds fixed."""


def windows(lines: Lines) -> pd.DataFrame:
    """Every window of every rank of every recorded trial."""
    return WINDOWS.frame(_nested(lines, "windows"))


def ranks(lines: Lines) -> pd.DataFrame:
    """Every rank of every recorded trial."""
    return RANKS.frame(_nested(lines, "ranks"))


def throughput(windows: Iterable[Mapping[str, Any]]) -> float | None:
    """All ranks' samples over the slowest rank's time, summed over the timed windows; None without one.

    Numerator and denominator cover the same steps. Windows begin together, so the slowest rank ends each.
    """
    weight = 0.0
    slowest: dict[int, float] = {}
    for window in windows:
        if not window["warmup"]:
            weight += window["weight"]
            number = window["window"]
            slowest[number] = max(slowest.get(number, 0.0), window["duration_s"])
    seconds = sum(slowest.values())
    return weight / seconds if seconds > 0 else None


def trials(lines: Lines, steps: pd.DataFrame) -> pd.DataFrame:
    """One row a trial and attempt, with what follows from its windows and steps."""
    frame = TRIALS.frame([_trial_row(line) for line in lines])
    timed = steps[~steps["warmup"]]
    by_trial = timed.groupby(["trial_id", "attempt"])
    stats = pd.DataFrame(
        {
            "step_s": by_trial["step_s"].median(),
            "wait_fraction": by_trial["wait_s"].sum() / by_trial["step_s"].sum(),
        }
    )
    kept = frame.drop(columns=["step_s", "wait_fraction"])
    merged = kept.merge(stats.reset_index(), on=["trial_id", "attempt"], how="left", validate="one_to_one")
    # on CUDA the host waits while the device works: its waiting is no part of the device's step
    merged["wait_fraction"] = merged["wait_fraction"].mask(merged["device"] == "cuda")
    return TRIALS.typed(merged)


def _trial_row(line: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: value for name, value in line.items() if name not in ("windows", "ranks")}
    peaks = [rank["peak_memory_bytes"] for rank in line["ranks"] if rank.get("peak_memory_bytes") is not None]
    first = [w for w in line["windows"] if w["rank"] == 0 and not w["warmup"]]
    return {
        **row,
        "throughput_per_s": throughput(line["windows"]),
        "peak_memory_bytes": max(peaks, default=None),
        "timed_steps": sum(window["steps"] for window in first) or None,
    }


def cells(trials: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row a measured cell: its throughput over blocks, its steps, its memory."""
    measured = _measured(trials).drop_duplicates(["cell_id", "block"], keep="last")
    keys = measured[["trial_id", "attempt", "cell_id"]]
    timed = steps[~steps["warmup"]].merge(keys, on=["trial_id", "attempt"], how="inner", validate="many_to_one")
    by_cell = timed.groupby("cell_id")["step_s"]
    p5, p50, p95 = (by_cell.quantile(q).to_dict() for q in (0.05, 0.5, 0.95))
    rows = []
    for cell_id, group in measured.groupby("cell_id", sort=False):
        first = group.iloc[0]
        speed = geometric_mean(group["throughput_per_s"].tolist())
        rows.append(
            {
                **{axis: first[axis] for axis in ("cell_id", "added", "parameters", "unit", *AXES)},
                "throughput_per_s": speed.value,
                **_ends(speed),
                "per_device_per_s": speed.value / first["devices"],
                "step_s": p50.get(cell_id),
                "step_p5_s": p5.get(cell_id),
                "step_p95_s": p95.get(cell_id),
                "wait_fraction": group["wait_fraction"].mean(),
                "peak_memory_bytes": group["peak_memory_bytes"].max(),
            }
        )
    return CELLS.frame(sorted(rows, key=_order))


def scaling(trials: pd.DataFrame) -> pd.DataFrame:
    """Speedup and efficiency of each measured cell against its base, paired by block and sitting.

    The base is the planned one; where it could not run, the smallest device count of the same strategy that
    did. A cell without either has no row: ratios never mix bases.
    """
    measured = _measured(trials)
    by_cell = {str(cell_id): group for cell_id, group in measured.groupby("cell_id", sort=False)}
    smallest = _smallest_of_family(by_cell)
    rows = []
    for cell_id, group in by_cell.items():
        first = group.iloc[0]
        base_id = first["base_id"] if first["base_id"] in by_cell else smallest.get(_family(first))
        if base_id is None or pd.isna(base_id):
            continue
        row = _against(group, by_cell[str(base_id)])
        if row is not None:
            named = {axis: first[axis] for axis in ("unit", *AXES)}
            rows.append({"cell_id": cell_id, "base_id": base_id, **named, **row})
    return SCALING.frame(sorted(rows, key=_order))


def _against(group: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any] | None:
    """The ratio columns of one cell; None where no block holds both it and the base."""
    keys = ["block", "sitting"]
    pairs = group[[*keys, "throughput_per_s"]].merge(
        base[[*keys, "throughput_per_s"]], on=keys, suffixes=("", "_base"), validate="one_to_one"
    )
    if pairs.empty:
        return None
    speeds, bases = pairs["throughput_per_s"].tolist(), pairs["throughput_per_s_base"].tolist()
    ratio = paired_ratio(speeds, bases)
    devices = float(group["devices"].iloc[0]) / float(base["devices"].iloc[0])
    return {
        "base_strategy": base["strategy"].iloc[0],
        "base_devices": base["devices"].iloc[0],
        "base_throughput_per_s": geometric_mean(bases).value,
        "throughput_per_s": geometric_mean(speeds).value,
        "speedup": ratio.value,
        **_ends(ratio),
        "efficiency": ratio.value / devices,
        "efficiency_low": None if ratio.low is None else ratio.low / devices,
        "efficiency_high": None if ratio.high is None else ratio.high / devices,
    }


def convergence(trials: pd.DataFrame, epochs: pd.DataFrame, target: Mapping[str, Any] | None) -> pd.DataFrame:
    """One row a training: where it ended, and when it reached the target, if it did.

    ``target``: {'metric': 'val_accuracy', 'at_least': 0.95} or with 'at_most'; None for no target.
    """
    done = trials[(trials["kind"] == "convergence") & trials["outcome"].isin(["ok", "diverged"])]
    by_trial = {key: group for key, group in epochs.groupby(["trial_id", "attempt"])}
    rows = []
    for _, trial in done.iterrows():
        curve = by_trial.get((trial["trial_id"], trial["attempt"]))
        if curve is None or curve.empty:
            continue
        curve = curve.sort_values("epoch")
        last = curve.iloc[-1]
        rows.append(
            {
                **{name: trial[name] for name in ("trial_id", "attempt", "cell_id", "seed", *AXES)},
                "epochs": last["epoch"],
                **{name: last[name] for name in ("train_loss", "val_loss", "val_accuracy", "train_s")},
                "best_val_accuracy": curve["val_accuracy"].max(),
                **_time_to_target(curve, target),
            }
        )
    return CONVERGENCE.frame(sorted(rows, key=_order))


def _time_to_target(curve: pd.DataFrame, target: Mapping[str, Any] | None) -> dict[str, Any]:
    if not target:
        return {}
    if target["metric"] not in curve:
        return {"target": f"{target['metric']}: no such metric was recorded"}
    values = curve[target["metric"]].astype("Float64")
    at_least = target.get("at_least")
    reached = values >= at_least if at_least is not None else values <= target["at_most"]
    sign, bound = (">=", at_least) if at_least is not None else ("<=", target["at_most"])
    named = {"target": f"{target['metric']} {sign} {bound:g}"}
    hits = curve[reached.fillna(False).astype(bool)]
    if hits.empty:
        return {**named, "reached": False}
    first = hits.iloc[0]
    return {
        **named,
        "reached": True,
        "time_to_target_s": first["train_s"],
        "samples_to_target": first["samples"],
        "epochs_to_target": first["epoch"],
    }


def outcomes(trials: pd.DataFrame) -> pd.DataFrame:
    """How many trials came to which outcome, and why; the last attempt of each counts."""
    last = trials.drop_duplicates("trial_id", keep="last")
    counts = last.groupby(["kind", "outcome", "reason"], dropna=False, sort=True).size().reset_index(name="trials")
    return OUTCOMES.typed(counts)


def _measured(trials: pd.DataFrame) -> pd.DataFrame:
    """The throughput trials that may enter a figure; the last where one was measured twice in a sitting."""
    ok = trials[(trials["kind"] == "throughput") & (trials["outcome"] == "ok")]
    return ok.drop_duplicates(["cell_id", "block", "sitting"], keep="last")


def _family(row: pd.Series[Any]) -> tuple[Any, ...]:
    batch = "global_batch_size" if row["scaling"] == "strong" else "per_device_batch_size"
    return (*(str(row[axis]) for axis in FAMILY), int(row[batch]))


def _smallest_of_family(by_cell: Mapping[str, pd.DataFrame]) -> dict[tuple[Any, ...], str]:
    smallest: dict[tuple[Any, ...], tuple[int, str]] = {}
    for cell_id, group in by_cell.items():
        first = group.iloc[0]
        candidate = (int(first["devices"]), cell_id)
        key = _family(first)
        smallest[key] = min(smallest.get(key, candidate), candidate)
    return {key: cell_id for key, (_, cell_id) in smallest.items()}


def _ends(estimate: Estimate) -> dict[str, Any]:
    return {"blocks": estimate.n, "low": estimate.low, "high": estimate.high}


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    batch = "global_batch_size" if row["scaling"] == "strong" else "per_device_batch_size"
    names = ("model", "data", "precision", "scaling", batch)
    fixed = tuple((pd.isna(row[name]), "" if pd.isna(row[name]) else _natural(row[name])) for name in names)
    return (*fixed, STRATEGIES.index(row["strategy"]), row["devices"], row["nodes"], row["options"])


def _natural(value: Any) -> Any:
    """Text so that resnet8 comes before resnet14; anything else as it is."""
    if not isinstance(value, str):
        return value
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"([0-9]+)", value)]


def _nested(lines: Lines, name: str) -> list[dict[str, Any]]:
    return [
        {"trial_id": line["trial_id"], "attempt": line["attempt"], **entry} for line in lines for entry in line[name]
    ]
