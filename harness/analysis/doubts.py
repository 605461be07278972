"""What speaks against a number, by name: each with the threshold that it crosses."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.common import Row, Rows, bases_of, by_cell, measured
from harness.analysis.steps import StepTimes
from harness.plan.thresholds import STEADY_CHANGE, STEADY_NOISE
from harness.record.frames import records

WIDE_SPREAD = 0.10
SLOW_RANK = 1.20
FOREIGN_CORES = 0.25
DOUBTS: dict[str, str] = {
    "no steady state": "the warm-up came to its limit before the medians of two rounds of steps, and the ends of the "
    f"last one's trend, were within {100 * STEADY_CHANGE:.0f} % (within their noise up to {100 * STEADY_NOISE:.0f} %)",
    "wide spread": f"the interquartile range of the timed steps is over {100 * WIDE_SPREAD:.0f} % of their median",
    "slow rank": f"that rank's own step, without gradient exchange, takes over {SLOW_RANK:g} times the median rank's "
    "(looked at where throughput.explain times ddp's steps alone)",
    "foreign load": f"other processes kept over {FOREIGN_CORES:g} cores of a node busy while steps were timed",
    "foreign load on the GPU": "other processes computed on a GPU while steps were timed",
    "memory swapped": "the node swapped memory while steps were timed",
    "clocks throttled": "heat or power held a GPU's clocks down for over a hundredth of the time, or at its end",
    "threads differ from the base's": "not as many threads a device as its base had",
    "other devices than the base's": "other models of devices",
    "other hosts than the base's": "not on the machine that its base ran on",
    "environment differs from the base's": "other versions, settings or hardware than in its base's worker group",
}
"""'slow rank' is followed by the rank's number."""
ENVIRONMENT_KEYS = ("cpu", "cores", "python", "packages", "cuda", "threads", "niceness")
PLACEMENT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Those that name what a worker group was given, and so differ between groups rightly."""

RANK_COLUMNS = (
    "trial_id",
    "attempt",
    "node_rank",
    "threads",
    "device_model",
    "host",
    "watched_s",
    "own_cpu_s",
    "node_cpu_s",
    "swapped_bytes",
    "throttled",
    "foreign_gpu_processes",
)
Key = tuple[Hashable, ...]
"""(trial id, attempt)."""


def doubts(
    trials: pd.DataFrame,
    times: StepTimes,
    windows: pd.DataFrame,
    ranks: pd.DataFrame,
    environment: Mapping[str, Any],
) -> pd.Series[str]:
    """For each row of ``trials`` its doubts, joined by '; '; empty where there are none."""
    ok = trials[trials["outcome"] == "ok"]
    spread = _spread(times)
    slow = slow_ranks(windows)
    by_trial: dict[Key, list[Row]] = {}
    for rank in records(ranks[[*RANK_COLUMNS]]):
        by_trial.setdefault((rank["trial_id"], rank["attempt"]), []).append(rank)
    machines = {key: _machine(rows) for key, rows in by_trial.items()}
    settings = _environments(environment)
    own = {(row["cell_id"], row["block"], row["invocation"]): row for row in records(ok) if not row["purpose"]}
    bases = bases_of(by_cell(measured(trials)))
    found: list[str] = []
    for row in records(trials):
        key = (row["trial_id"], row["attempt"])
        names: list[str] = []
        if row["outcome"] == "ok" and pd.notna(row["throughput_per_s"]):
            names += _own(row, spread.get(key), slow.get(key), by_trial.get(key))
            base = own.get((bases.get(row["cell_id"], row["base_id"]), row["block"], row["invocation"]))
            if base is not None and base["trial_id"] != row["trial_id"]:
                names += _beside(machines.get(key), machines.get((base["trial_id"], base["attempt"])))
                mine, other = (settings.get((one["group_id"], one["invocation"])) for one in (row, base))
                if mine and other and mine != other:
                    names.append("environment differs from the base's")
        found.append("; ".join(names))
    return pd.Series(found, index=trials.index, dtype="string")


def slow_ranks(windows: pd.DataFrame) -> dict[Key, int]:
    """The rank whose own step, without gradient exchange, is longest by more than SLOW_RANK, where there is one."""
    alone = windows[windows["window_kind"] == "alone"]
    sums = alone.groupby(["trial_id", "attempt", "rank"])[["duration_s", "steps"]].sum()
    by_trial = (sums["duration_s"] / sums["steps"]).astype(float).groupby(["trial_id", "attempt"])
    slow = by_trial.max() > SLOW_RANK * by_trial.quantile(0.5, interpolation="lower")  # never so with one rank
    return {(trial_id, attempt): int(rank) for trial_id, attempt, rank in by_trial.idxmax()[slow]}


def _own(row: Mapping[Hashable, Any], spread: float | None, slow: int | None, ranks: Rows | None) -> list[str]:
    """What a trial's own record says against it."""
    names = []
    if not pd.isna(row["steady"]) and not row["steady"]:
        names.append("no steady state")
    if spread is not None and spread > WIDE_SPREAD:
        names.append("wide spread")
    if slow is not None:
        names.append(f"slow rank {slow}")
    if ranks is not None:
        names += _of_load(ranks)
    return names


def _of_load(ranks: Rows) -> list[str]:
    names = []
    nodes: dict[Any, list[Row]] = {}
    for rank in ranks:
        nodes.setdefault(rank["node_rank"], []).append(rank)
    if any((foreign_cores(node) or 0.0) > FOREIGN_CORES for node in nodes.values()):
        names.append("foreign load")
    if any(not pd.isna(rank["swapped_bytes"]) and rank["swapped_bytes"] > 0 for rank in ranks):
        names.append("memory swapped")
    if any(rank["throttled"] for rank in ranks if not pd.isna(rank["throttled"])):
        names.append("clocks throttled")
    if any(rank["foreign_gpu_processes"] > 0 for rank in ranks if not pd.isna(rank["foreign_gpu_processes"])):
        names.append("foreign load on the GPU")
    return names


def foreign_cores(node: Rows) -> float | None:
    """Cores that other processes kept busy on one node: its processor time less its ranks', over the time."""
    watched = ("watched_s", "node_cpu_s", "own_cpu_s")
    known = [rank for rank in node if not any(pd.isna(rank[name]) for name in watched)]
    seconds = max((float(rank["watched_s"]) for rank in known), default=0.0)
    if seconds <= 0:
        return None
    busy = max(float(rank["node_cpu_s"]) for rank in known) - sum(float(rank["own_cpu_s"]) for rank in known)
    return max(0.0, busy / seconds)


def _beside(mine: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> list[str]:
    """What differs between a trial's machines and its base's."""
    if mine is None or base is None:
        return []
    names = []
    if mine["threads"] != base["threads"]:
        names.append("threads differ from the base's")
    if mine["models"] != base["models"]:
        names.append("other devices than the base's")
    if not base["hosts"] <= mine["hosts"]:
        names.append("other hosts than the base's")
    return names


def _machine(ranks: Rows) -> dict[str, set[Any]]:
    names = {"threads": "threads", "models": "device_model", "hosts": "host"}
    return {key: {rank[name] for rank in ranks if not pd.isna(rank[name])} for key, name in names.items()}


def _environments(environment: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """What each worker group's nodes were like and how they were set, as text to compare."""
    return {
        (group["group_id"], group["invocation"]): json.dumps(sorted({_signature(node) for node in group["nodes"]}))
        for group in environment.get("groups", [])
        if group.get("nodes")
    }


def _key(index: Any) -> Key:
    return tuple(index)


def _signature(node: Mapping[str, Any]) -> str:
    variables = {k: v for k, v in (node.get("variables") or {}).items() if k not in PLACEMENT_VARIABLES}
    memory_gib = round((node.get("memory_bytes") or 0) / 2**30)
    return json.dumps([*(node.get(key) for key in ENVIRONMENT_KEYS), memory_gib, variables], sort_keys=True)


def tally(doubts: Sequence[Any]) -> str | None:
    """'wide spread (2 of 3)': each doubt of a cell's trials, with how many of them have it; None without one."""
    names = [name for text in doubts if not pd.isna(text) for name in str(text).split("; ") if name]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return "; ".join(f"{name} ({count} of {len(doubts)})" for name, count in counts.items()) or None


def _spread(times: StepTimes) -> dict[Key, float]:
    """The interquartile range of each trial's timed steps over their median."""
    by_trial = times.by_trial
    spread = (by_trial["q3_s"] - by_trial["q1_s"]) / by_trial["median_s"]
    return {_key(key): float(value) for key, value in spread.items()}
