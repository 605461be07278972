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
    windows = [
        {
            "rank": rank,
            "window": number,
            "window_kind": "timed" if number else "warmup",
            "duration_s": 100.0 / rate,
            "steps": 10,
            "weight": 100.0,
        }
        for rank, rate in enumerate(rates)
        for number in (0, 1)
    ]
    repeat = f"b{block}" if kind == "throughput" else f"s{columns.get('seed', 0)}"
    return with_set_ids(
        {
            "trial_id": f"{cell}-{repeat}",
            "attempt": 1,
            "cell_id": cell,
            "base_id": base,
            "kind": kind,
            "purpose": columns.pop("purpose", ""),
            "check_id": None,
            "alone_id": None,
            "wrapped_id": None,
            "launcher": "ray",
            "block": block,
            "seed": 0,
            "invocation": 0,
            "group_id": f"b{block}-g0",
            "position": 0,
            "added": False,
            "outcome": outcome,
            "reason": "" if outcome == "ok" else f"because of {outcome}",
            "error_type": None,
            "error_rank": None,
            "log": None,
            "workload": "image_classification",
            "data": "digits",
            "model": "resnet8",
            "strategy": strategy,
            "device": "cpu",
            "devices": devices,
            "nodes": 1,
            "scaling": "weak",
            "per_device_batch_size": 10,
            "global_batch_size": 10 * devices,
            "precision": "fp32",
            "compile": False,
            "oversubscribed": False,
            "emulated": strategy == "dp",
            "emulated_compute": False,
            "options": {},
            "unit": "samples",
            "parameters": 1000,
            "started_at": 0.0,
            "trial_s": 3.0,
            "facts": columns.pop("facts", {"steady": True}),
            "parts": {"build": 0.5, "warmup": 0.5, "windows": 1.5, "other": 0.5},
            "steps_s": 2.0,
            "ranks": [
                {"rank": rank, "local_rank": rank, "node_rank": 0, "peak_memory_bytes": 1000 + rank}
                for rank in range(len(rates))
            ]
            if outcome == "ok"
            else [],
            "windows": windows if outcome == "ok" and kind == "throughput" else [],
            **columns,
        }
    )


def rank_row(rank: int) -> RankRow:
    """The place of a rank on a machine of one node."""
    return {
        "rank": rank,
        "local_rank": rank,
        "node_rank": 0,
        "node_id": "n",
        "address": "127.0.0.1",
        "host": "vm",
        "devices": "cpu",
        "threads": 1,
    }


def with_set_ids(line: dict[str, Any]) -> dict[str, Any]:
    """The line with the ids of the sets that its cell is compared in, as its axes are now."""
    return {**line, **set_ids(line)}


def steps_of(lines: list[dict[str, Any]], step_s: float = 0.1) -> StepTimes:
    """Ten timed steps and one warm-up step, which does not count, for every rank of the measured trials."""
    rows = [
        {
            "trial_id": one["trial_id"],
            "attempt": one["attempt"],
            "rank": window["rank"],
            "window": window["window"],
            "step": step,
            "warmup": window["window_kind"] == "warmup",
            "step_s": 9.0 if window["window_kind"] == "warmup" else step_s,
            "wait_s": 0.25 * step_s,
            "loss": 1.0,
        }
        for one in lines
        for window in one["windows"]
        for step in range(1 if window["window_kind"] == "warmup" else 10)
    ]
    return step_times(STEPS.frame(rows))


def trials_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of these trials."""
    return trial_tables.trials(lines, steps_of(lines))


def epochs_of(trial_id: str, accuracies: list[float], attempt: int = 1) -> pd.DataFrame:
    """One row an epoch; each took one second and 100 samples."""
    return EPOCHS.frame(
        {
            "trial_id": trial_id,
            "attempt": attempt,
            "epoch": epoch,
            "samples": 100 * epoch,
            "train_s": float(epoch),
            "evaluation_s": 0.1,
            "train_loss": 1.0 / epoch,
            "val_loss": 2.0 / epoch,
            "val_accuracy": accuracy,
        }
        for epoch, accuracy in enumerate(accuracies, start=1)
    )


def link_row(operation: str, **columns: Any) -> dict[str, Any]:
    """One size of one transfer or collective."""
    row = {
        "operation": operation,
        "backend": "gloo",
        "tier": "inside a node",
        "source": None,
        "target": None,
        "link": None,
        "size_bytes": 1024,
        "repetitions": 5,
        "calls": 2,
        "time_s": 1e-3,
        "min_s": 0.9e-3,
        "max_s": 1.2e-3,
    }
    return {**row, **columns}


def links_line(*rows: dict[str, Any], cell: str = "ddp", devices: int = 2, **columns: Any) -> dict[str, Any]:
    """The recorded measurement of one placement."""
    ranks = [{"rank": rank, "node_rank": 0, "device_model": "a processor"} for rank in range(devices)]
    fixed = {"kind": "diagnostic", "purpose": "links", "trial_id": f"{cell}-b0l", "devices": devices, "ranks": ranks}
    return line(cell, **{**fixed, "links": list(rows), **columns})
