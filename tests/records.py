"""Hand-made records: what a run would have written, in a few words."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.analysis import trials as trial_tables
from harness.analysis.step_times import StepTimes, step_times
from harness.plan.comparison import set_ids
from harness.plan.rows import RankRow
from harness.record.schema import EPOCHS, STEPS


def line(
    cell: str = "single",
    *,
    block: int = 0,
    base: str = "single",
    rates: tuple[float, ...] = (100.0,),
    outcome: str = "ok",
    kind: str = "throughput",
    **columns: Any,
) -> dict[str, Any]:
    """One recorded trial. ``rates``: each rank's samples/s in its one timed window of 10 steps."""
    strategy = columns.pop("strategy", cell.rstrip("0123456789") or "single")
    devices = columns.pop("devices", len(rates))
    repeat = f"b{block}" if kind == "throughput" else f"s{columns.get('seed', 0)}"
    ids: dict[str, Any] = {"trial_id": f"{cell}-{repeat}", "attempt": 1, "cell_id": cell, "base_id": base}
    ids |= dict.fromkeys(("check_id", "alone_id", "wrapped_id", "error_type", "error_rank", "log"))
    asked = {"kind": kind, "purpose": "", "launcher": "ray", "block": block, "seed": 0, "added": False}
    place = {"invocation": 0, "group_id": f"b{block}-g0", "position": 0}
    ended = {"outcome": outcome, "reason": "" if outcome == "ok" else f"because of {outcome}"}
    workload = {"workload": "image_classification", "data": "digits", "model": "resnet8", "parameters": 1000}
    placed = {"strategy": strategy, "device": "cpu", "devices": devices, "nodes": 1, "oversubscribed": False}
    batch = {"scaling": "weak", "per_device_batch_size": 10, "global_batch_size": 10 * devices, "unit": "samples"}
    options = {
        "precision": "fp32",
        "compile": False,
        "compile_mode": "default",
        "activation_checkpointing": "none",
        "options": {},
        "emulated_compute": False,
    }
    timed = {"started_at": 0.0, "trial_s": 3.0, "steps_s": 2.0, "facts": {"steady": True}}
    parts = {"build": 0.5, "warmup": 0.5, "windows": 1.5, "other": 0.5}
    ranks = [
        {"rank": rank, "local_rank": rank, "node_rank": 0, "peak_memory_bytes": 1000 + rank}
        for rank in range(len(rates))
    ]
    windows = [
        {"rank": rank, "window": number, "window_kind": name, "duration_s": 100.0 / rate, "steps": 10, "weight": 100.0}
        for rank, rate in enumerate(rates)
        for number, name in enumerate(("warmup", "timed"))
    ]
    measured: dict[str, Any] = {"parts": parts, "ranks": [], "windows": [], "emulated": strategy == "dp"}
    if outcome == "ok":
        measured |= {"ranks": ranks, "windows": windows if kind == "throughput" else []}
    cell_axes = {**workload, **placed, **batch, **options}
    return with_set_ids({**ids, **asked, **place, **ended, **cell_axes, **timed, **measured, **columns})


def rank_row(rank: int) -> RankRow:
    """The place of a rank on a machine of one node."""
    node: Any = {"node_rank": 0, "node_id": "n", "address": "127.0.0.1", "host": "vm", "devices": "cpu", "threads": 1}
    return {"rank": rank, "local_rank": rank, **node}


def with_set_ids(line: dict[str, Any]) -> dict[str, Any]:
    """The line with the ids of the sets that its cell is compared in, as its axes are now."""
    return {**line, **set_ids(line)}


WARMUP = {"warmup": True, "step_s": 9.0}


def steps_of(lines: list[dict[str, Any]], step_s: float = 0.1) -> StepTimes:
    """Ten timed steps and one warm-up step, which does not count, for every rank of the measured trials."""
    rows = [
        {"trial_id": one["trial_id"], "attempt": one["attempt"], "rank": window["rank"], "window": window["window"]}
        | (WARMUP if window["window_kind"] == "warmup" else {"warmup": False, "step_s": step_s})
        | {"step": step, "wait_s": 0.25 * step_s, "loss": 1.0}
        for one in lines
        for window in one["windows"]
        for step in range(1 if window["window_kind"] == "warmup" else 10)
    ]
    return step_times(STEPS.frame(rows))


def trials_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    return trial_tables.trials(lines, steps_of(lines))


def epochs_of(trial_id: str, accuracies: list[float], attempt: int = 1) -> pd.DataFrame:
    """One row an epoch; each took one second and 100 samples."""
    return EPOCHS.frame(
        {"trial_id": trial_id, "attempt": attempt, "epoch": epoch, "samples": 100 * epoch, "val_accuracy": accuracy}
        | {"train_s": float(epoch), "evaluation_s": 0.1, "train_loss": 1.0 / epoch, "val_loss": 2.0 / epoch}
        for epoch, accuracy in enumerate(accuracies, start=1)
    )


def link_row(operation: str, **columns: Any) -> dict[str, Any]:
    ends = {"backend": "gloo", "tier": "inside a node", "source": None, "target": None, "link": None}
    times = {"size_bytes": 1024, "repetitions": 5, "calls": 2, "time_s": 1e-3, "min_s": 0.9e-3, "max_s": 1.2e-3}
    return {"operation": operation, **ends, **times, **columns}


def links_line(*rows: dict[str, Any], cell: str = "ddp", devices: int = 2, **columns: Any) -> dict[str, Any]:
    """The recorded measurement of one placement."""
    ranks = [{"rank": rank, "node_rank": 0, "device_model": "a processor"} for rank in range(devices)]
    fixed = {"kind": "diagnostic", "purpose": "links", "trial_id": f"{cell}-b0l", "devices": devices, "ranks": ranks}
    return line(cell, **{**fixed, "links": list(rows), **columns})
