"""Evidence on a trial, gathered from the recorded tables, on which its doubts depend; the table of stalled steps.

A trial with a stalled step is measured and counts: the doubt ``stalled`` marks it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import pandas as pd

from harness.analysis.common import (
    KEYS,
    AnyRow,
    Row,
    Rows,
    TrialKey,
    columns_of,
    grouped,
    rows_of,
    throughput,
    trial_key,
)
from harness.analysis.step_times import STALL_RATIO, STALL_S, StepTimes
from harness.config.axes import NAMED_AXES
from harness.config.values import GIB
from harness.plan.checks import SLOW_RANK
from harness.plan.rows import HELD_BY_POWER, POWER_CAP
from harness.plan.run_environment import NodeEnvironment, RunEnvironment
from harness.record.schema import DESCRIPTION, STALLS

LEAST_STEPS = 10
ENVIRONMENT_KEYS = ("cpu", "cores", "python", "packages", "cuda", "threads", "niceness")
PLACEMENT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that depend on the placement of a worker group: a difference between groups is no doubt."""

Pair = tuple[float, float]
TRAINED_ALIKE = (*(name for name in NAMED_AXES if name != "per_device_batch_size"), "options")
"""Columns that are equal for a training and for the timed trials of the same steps."""
RANK_COLUMNS = (
    *("trial_id", "attempt", "node_rank", "threads", "settings", "device_model", "host", "watched_s", "own_cpu_s"),
    *("node_cpu_s", "swapped_bytes", "throttled", "sm_clock_mhz", "foreign_gpu_processes"),
)


def throttling(rank: AnyRow) -> list[str]:
    """Return the reasons for a rank's throttled clocks, its GPUs' power limit excepted."""
    reasons: list[str] = [] if pd.isna(rank["throttled"]) else str(rank["throttled"]).split(", ")
    return [reason for reason in reasons if reason not in ("", POWER_CAP, HELD_BY_POWER)]


def slow_ranks(windows: pd.DataFrame) -> dict[TrialKey, int]:
    """Return the slowest rank of each trial, if its step without gradient exchange exceeds SLOW_RANK medians.

    Over fewer than LEAST_STEPS steps, as those of a script's profile, a rank may be slow by chance.
    """
    alone = windows[windows["window_kind"] == "alone"]
    alone = alone.assign(duration_s=alone["duration_s"] - alone["late_s"].fillna(0.0))
    sums = alone.groupby([*KEYS, "rank"])[["duration_s", "steps"]].sum()
    sums = sums[sums["steps"] >= LEAST_STEPS]
    by_trial = (sums["duration_s"] / sums["steps"]).astype(float).groupby(KEYS)
    slow = by_trial.max() > SLOW_RANK * by_trial.quantile(0.5, interpolation="lower")  # a single rank is its own median
    return {(trial_id, attempt): int(rank) for trial_id, attempt, rank in by_trial.idxmax()[slow]}


def window_drift(windows: pd.DataFrame) -> dict[TrialKey, float]:
    """Return the highest rate of each trial's timed windows over the lowest; a window's time is its slowest rank's."""
    timed = windows[windows["window_kind"] == "timed"].groupby([*KEYS, "window"])
    rates = (timed["weight"].sum() / timed["duration_s"].max()).astype(float)
    by_trial = rates[rates > 0].groupby(KEYS)
    drift: dict[TrialKey, float] = (by_trial.max() / by_trial.min()).to_dict()  # type: ignore[assignment]
    return drift


def steps_in_epochs(trials: pd.DataFrame, windows: pd.DataFrame, epochs: pd.DataFrame) -> dict[TrialKey, Pair]:
    """Return a step's time in epochs over that in timed windows, of each timed trial whose setting was also trained.

    Two numbers: from the second epoch on, the medians over the first and over the second half of the epochs of all
    trainings of the setting. The time in windows is the median over its trials.
    """
    timed = windows[windows["window_kind"] == "timed"].groupby([*KEYS, "window"])[["duration_s", "steps"]].max()
    sums = timed.groupby(KEYS).sum()
    in_window = (sums["duration_s"] / sums["steps"]).astype(float).to_dict()
    by_themselves = epochs[epochs["evaluation_s"].notna()].sort_values([*KEYS, "epoch"])  # a script's contain more
    curves = grouped(rows_of(by_themselves), trial_key) if in_window else {}
    ok = rows_of(trials.loc[trials["outcome"] == "ok", [*KEYS, "kind", *TRAINED_ALIKE]])
    found: dict[TrialKey, Pair] = {}
    for rows in grouped(ok, lambda row: tuple(str(getattr(row, name)) for name in TRAINED_ALIKE)).values():
        measured = [trial_key(row) for row in rows if trial_key(row) in in_window]
        trained = [curves[trial_key(row)] for row in rows if row.kind == "convergence" and trial_key(row) in curves]
        halves = [_halves(curve, rows[0].global_batch_size) for curve in trained if len(curve) > 1]
        if measured and halves:
            usual = median(in_window[key] for key in measured)
            early, late = (median(each) / usual for each in zip(*halves, strict=True))
            found |= dict.fromkeys(measured, (early, late))
    return found


def _halves(curve: Rows, batch: int) -> Pair:
    """Return the median seconds of a step in the first and in the second half of the epochs from the second on."""
    steps = [
        float(now.train_s - before.train_s) * batch / (now.samples - before.samples) for before, now in pairwise(curve)
    ]
    half = (len(steps) + 1) // 2
    return median(steps[:half]), median(steps[-half:])


def foreign_cores(node: Sequence[AnyRow]) -> float | None:
    """Return the cores that other processes kept busy on a node: (node CPU time - ranks' CPU time) / seconds."""
    watched = ("watched_s", "node_cpu_s", "own_cpu_s")
    known = [rank for rank in node if not any(pd.isna(rank[name]) for name in watched)]
    seconds = max((float(rank["watched_s"]) for rank in known), default=0.0)
    if seconds <= 0:
        return None
    busy = max(float(rank["node_cpu_s"]) for rank in known) - sum(float(rank["own_cpu_s"]) for rank in known)
    return max(0.0, busy / seconds)


def group_environments(environment: RunEnvironment) -> dict[tuple[str, int], list[dict[str, object]]]:
    """Return the hardware, versions and settings of each worker group's nodes, by group id and invocation.

    Without what depends on the placement of a group. Groups whose start-up failed are left out.
    """
    return {
        (group["group_id"], group["invocation"]): [_settings(node) for node in group["nodes"]]
        for group in environment.get("groups", [])
        if group.get("nodes")
    }


def environment_id(nodes: Sequence[NodeEnvironment], code: str, own: Collection[str] = ()) -> str | None:
    """Return a hash of the code, and of hardware, versions and settings of a group's nodes; None without nodes.

    ``own``: names of the variables that are left out since the group's cells have them: cells may differ in them.
    """
    models = sorted({device["model"] for node in nodes for device in node["devices"]})
    text = json.dumps([code, models, signature(_settings(node, own) for node in nodes)])
    return hashlib.sha256(text.encode()).hexdigest()[:12] if nodes else None


def _settings(node: NodeEnvironment, own: Collection[str] = ()) -> dict[str, object]:
    recorded: Mapping[str, object] = node
    left_out = {*PLACEMENT_VARIABLES, *own}
    variables = {k: v for k, v in (node.get("variables") or {}).items() if k not in left_out}
    memory_gib = round((node.get("memory_bytes") or 0) / GIB)
    return {**{key: recorded.get(key) for key in ENVIRONMENT_KEYS}, "memory_gib": memory_gib, "variables": variables}


def signature(nodes: Iterable[Mapping[str, object]]) -> str:
    """Return the settings of nodes as text for comparison."""
    return json.dumps(sorted({json.dumps(node, sort_keys=True) for node in nodes}))


MOSTLY = 0.5
"""The fraction of a stalled step from which on its wait for data is the cause."""


def stalls(
    trials: pd.DataFrame, windows: pd.DataFrame, ranks: pd.DataFrame, steps: pd.DataFrame, times: StepTimes
) -> pd.DataFrame:
    """Return one row a timed window in which a rank had a stalled step, with the trial's throughput without them.

    ``stalled_s``: the seconds of its stalled steps, each on its slowest rank.
    """
    long = steps[~steps["warmup"].fillna(True).astype(bool) & (steps["step_s"] > STALL_S).fillna(False).astype(bool)]
    medians = times.by_trial[["step_median_s"]].rename_axis(KEYS).reset_index()
    merged = long.merge(medians, on=KEYS, how="inner", validate="many_to_one")
    found = rows_of(merged[merged["step_s"] > STALL_RATIO * merged["step_median_s"]])
    by_trial = grouped(found, trial_key)
    of_trial = {trial_key(row): row for row in _of_trials(trials, by_trial)}
    timed, counters = (grouped(_of_trials(frame, by_trial), trial_key) for frame in (windows, ranks))
    rows = []
    for key, of_steps in by_trial.items():
        if key not in of_trial:
            continue
        by_window = grouped(of_steps, lambda step: int(step.window))
        unstalled = throughput(row for row in timed.get(key, []) if row.window not in by_window)
        for window, own in by_window.items():
            slowest = grouped(own, lambda step: step.step).values()
            rows.append(
                {
                    **columns_of(of_trial[key], *KEYS, "cell_id", *DESCRIPTION, "block", "unit", "throughput_per_s"),
                    "window": window,
                    "step_median_s": float(own[0].step_median_s),
                    "stalled_s": sum(max(float(step.step_s) for step in of_ranks) for of_ranks in slowest),
                    "waiting_ranks": _names(int(step.rank) for step in own),
                    "cause": _cause(own, counters.get(key, [])),
                    "unstalled_throughput_per_s": unstalled,
                }
            )
    return STALLS.frame(rows)


def _of_trials(frame: pd.DataFrame, keys: Collection[TrialKey]) -> list[Row]:
    """Return the rows of these trials, of all their attempts."""
    return rows_of(frame[frame["trial_id"].isin({trial_id for trial_id, _ in keys})])


def _cause(steps: Rows, ranks: Rows) -> str | None:
    """Return what counters show; None if none shows anything."""
    waited = [step for step in steps if pd.notna(step.wait_s) and step.wait_s > MOSTLY * step.step_s]
    for_data = [int(step.rank if pd.isna(step.wait_rank) else step.wait_rank) for step in waited]
    swapped = [int(rank.rank) for rank in ranks if pd.notna(rank.swapped_bytes) and rank.swapped_bytes > 0]
    throttled = [int(rank.rank) for rank in ranks if throttling(rank)]
    seen = {"waited for data": for_data, "its node swapped memory": swapped, "clocks throttled": throttled}
    return "; ".join(f"{what} (rank {_names(which)})" for what, which in seen.items() if which) or None


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))
