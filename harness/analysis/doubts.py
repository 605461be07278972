"""Doubts about a number: the name of each, its threshold, its meaning and the function that tests for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from harness.analysis.common import Row, Rows, bases_of, by_cell, measured
from harness.analysis.steps import StepTimes
from harness.plan.environment import NodeEnvironment, RunEnvironment
from harness.plan.thresholds import STEADY_CHANGE, STEADY_NOISE
from harness.record.frames import records
from harness.system.units import GIB

WIDE_SPREAD = 0.10
SLOW_RANK = 1.20
FOREIGN_CORES = 0.25
ENVIRONMENT_KEYS = ("cpu", "cores", "python", "packages", "cuda", "threads", "niceness")
PLACEMENT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that depend on the placement of a worker group: a difference between groups is no doubt."""

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


@dataclass(frozen=True)
class Evidence:
    """The facts on which the doubts of one trial depend; None if a value is unknown.

    ``spread``: interquartile range of the timed steps over their median. ``slow_rank``: the rank that exceeds
    SLOW_RANK. ``nodes``: the worker group's nodes and their settings, as text for comparison.
    """

    steady: bool | None
    spread: float | None
    slow_rank: int | None
    ranks: Rows
    nodes: str | None
    inline: bool = False

    def values(self, name: str) -> set[Any]:
        """Return the known values of a column over the trial's ranks."""
        return {rank[name] for rank in self.ranks if not pd.isna(rank[name])}


class Doubt(NamedTuple):
    """``own`` tests a trial alone, ``beside`` a trial against its base in the same block and invocation."""

    meaning: str
    own: Callable[[Evidence], bool] = lambda trial: False
    beside: Callable[[Evidence, Evidence], bool] = lambda trial, base: False


def _inline(trial: Evidence) -> bool:
    return trial.inline


def _unsteady(trial: Evidence) -> bool:
    return trial.steady is False


def _wide_spread(trial: Evidence) -> bool:
    return trial.spread is not None and trial.spread > WIDE_SPREAD


def _slow_rank(trial: Evidence) -> bool:
    return trial.slow_rank is not None


def _foreign_load(trial: Evidence) -> bool:
    nodes: dict[int | None, list[Row]] = {}
    for rank in trial.ranks:
        nodes.setdefault(rank["node_rank"], []).append(rank)
    return any((foreign_cores(node) or 0.0) > FOREIGN_CORES for node in nodes.values())


def _swapped(trial: Evidence) -> bool:
    return any(swapped > 0 for swapped in trial.values("swapped_bytes"))


def _throttled(trial: Evidence) -> bool:
    return any(trial.values("throttled"))


def _foreign_gpu_load(trial: Evidence) -> bool:
    return any(processes > 0 for processes in trial.values("foreign_gpu_processes"))


def _other_threads(trial: Evidence, base: Evidence) -> bool:
    return _both_known(trial, base) and trial.values("threads") != base.values("threads")


def _other_devices(trial: Evidence, base: Evidence) -> bool:
    return _both_known(trial, base) and trial.values("device_model") != base.values("device_model")


def _other_hosts(trial: Evidence, base: Evidence) -> bool:
    """Return whether a host of the base is missing; a cell on several nodes may use more hosts than its base."""
    return _both_known(trial, base) and not base.values("host") <= trial.values("host")


def _other_environment(trial: Evidence, base: Evidence) -> bool:
    return trial.nodes is not None and base.nodes is not None and trial.nodes != base.nodes


def _both_known(trial: Evidence, base: Evidence) -> bool:
    return bool(trial.ranks and base.ranks)


DOUBTS: Mapping[str, Doubt] = {
    "inline": Doubt(
        "the trial ran in the command's own process (--inline), where a debugger may have stopped it; no ratio uses it",
        own=_inline,
    ),
    "no steady state": Doubt(
        "the warm-up reached its limit before the medians of two successive rounds of steps, and the ends of the last "
        f"round's trend, agreed within {100 * STEADY_CHANGE:.0f} % (or within their noise, up to "
        f"{100 * STEADY_NOISE:.0f} %)",
        own=_unsteady,
    ),
    "wide spread": Doubt(
        f"the interquartile range of the timed steps exceeds {100 * WIDE_SPREAD:.0f} % of their median",
        own=_wide_spread,
    ),
    "slow rank": Doubt(
        f"that rank's step without gradient exchange takes more than {SLOW_RANK:g} times the median rank's "
        "(known only if throughput.explain times ddp's steps without exchange)",
        own=_slow_rank,
    ),
    "foreign load": Doubt(
        f"other processes kept more than {FOREIGN_CORES:g} cores of a node busy during the timed steps",
        own=_foreign_load,
    ),
    "memory swapped": Doubt("the node swapped memory during the timed steps", own=_swapped),
    "clocks throttled": Doubt(
        "a GPU's clocks were throttled by heat or power for more than 1 % of the timed steps, or at their end",
        own=_throttled,
    ),
    "foreign load on the GPU": Doubt(
        "other processes computed on a GPU during the timed steps",
        own=_foreign_gpu_load,
    ),
    "threads differ from the base's": Doubt(
        "the number of threads per device is not the base's", beside=_other_threads
    ),
    "other devices than the base's": Doubt("the device models are not the base's", beside=_other_devices),
    "other hosts than the base's": Doubt("a host of the base is not among the trial's hosts", beside=_other_hosts),
    "environment differs from the base's": Doubt(
        "versions, settings or hardware differ from those of the base's worker group",
        beside=_other_environment,
    ),
}
"""Doubts in the order in which a trial lists them; 'slow rank' is followed by the rank's number."""


def doubts(
    trials: pd.DataFrame,
    times: StepTimes,
    windows: pd.DataFrame,
    ranks: pd.DataFrame,
    environment: RunEnvironment,
) -> pd.Series[str]:
    """Return the doubts of each row of ``trials``, joined by '; '; empty if there are none."""
    evidence = _evidence(trials, times, windows, ranks, environment)
    ok = records(trials[trials["outcome"] == "ok"])
    measured_in = {(row["cell_id"], row["block"], row["invocation"]): row for row in ok if not row["purpose"]}
    bases = bases_of(by_cell(measured(trials)))
    texts: list[str] = []
    for row in records(trials):
        names: list[str] = []
        if row["outcome"] == "ok" and pd.notna(row["throughput_per_s"]):
            base_id = bases.get(row["cell_id"], row["base_id"])
            base = measured_in.get((base_id, row["block"], row["invocation"]))
            is_other = base is not None and base["trial_id"] != row["trial_id"]
            names += _doubt_names(evidence[_key(row)], evidence[_key(base)] if base is not None and is_other else None)
        texts.append("; ".join(names))
    return pd.Series(texts, index=trials.index, dtype="string")


def _doubt_names(trial: Evidence, base: Evidence | None) -> Iterator[str]:
    for name, doubt in DOUBTS.items():
        if doubt.own(trial) or (base is not None and doubt.beside(trial, base)):
            yield f"{name} {trial.slow_rank}" if doubt.own is _slow_rank else name


def _evidence(
    trials: pd.DataFrame,
    times: StepTimes,
    windows: pd.DataFrame,
    ranks: pd.DataFrame,
    environment: RunEnvironment,
) -> dict[Key, Evidence]:
    """Return the evidence of each trial, by its id and attempt."""
    spread, slow, nodes = _spread(times), slow_ranks(windows), _environments(environment)
    by_trial: dict[Key, list[Row]] = {}
    for rank in records(ranks[[*RANK_COLUMNS]]):
        by_trial.setdefault(_key(rank), []).append(rank)
    return {
        _key(row): Evidence(
            None if pd.isna(row["steady"]) else bool(row["steady"]),
            spread.get(_key(row)),
            slow.get(_key(row)),
            by_trial.get(_key(row), []),
            nodes.get((row["group_id"], row["invocation"])),
            inline=bool(pd.notna(row["inline"]) and row["inline"]),
        )
        for row in records(trials)
    }


def _key(row: Row) -> Key:
    return (row["trial_id"], row["attempt"])


def slow_ranks(windows: pd.DataFrame) -> dict[Key, int]:
    """Return the slowest rank of each trial, if its step without gradient exchange exceeds SLOW_RANK medians."""
    alone = windows[windows["window_kind"] == "alone"]
    sums = alone.groupby(["trial_id", "attempt", "rank"])[["duration_s", "steps"]].sum()
    by_trial = (sums["duration_s"] / sums["steps"]).astype(float).groupby(["trial_id", "attempt"])
    slow = by_trial.max() > SLOW_RANK * by_trial.quantile(0.5, interpolation="lower")  # a single rank is its own median
    return {(trial_id, attempt): int(rank) for trial_id, attempt, rank in by_trial.idxmax()[slow]}


def foreign_cores(node: Rows) -> float | None:
    """Return the cores that other processes kept busy on a node: (node CPU time - ranks' CPU time) / seconds."""
    watched = ("watched_s", "node_cpu_s", "own_cpu_s")
    known = [rank for rank in node if not any(pd.isna(rank[name]) for name in watched)]
    seconds = max((float(rank["watched_s"]) for rank in known), default=0.0)
    if seconds <= 0:
        return None
    busy = max(float(rank["node_cpu_s"]) for rank in known) - sum(float(rank["own_cpu_s"]) for rank in known)
    return max(0.0, busy / seconds)


def _environments(environment: RunEnvironment) -> dict[tuple[str, int], str]:
    """Return the hardware and settings of each worker group's nodes, as text for comparison."""
    return {
        (group["group_id"], group["invocation"]): json.dumps(sorted({_signature(node) for node in group["nodes"]}))
        for group in environment.get("groups", [])
        if group.get("nodes")
    }


def _signature(node: NodeEnvironment) -> str:
    settings: Mapping[str, object] = node
    variables = {k: v for k, v in (node.get("variables") or {}).items() if k not in PLACEMENT_VARIABLES}
    memory_gib = round((node.get("memory_bytes") or 0) / GIB)
    return json.dumps([*(settings.get(key) for key in ENVIRONMENT_KEYS), memory_gib, variables], sort_keys=True)


def tally(doubts: Sequence[str | None]) -> str | None:
    """Return each doubt of a cell's trials with its number of trials: 'wide spread (2 of 3)'; None without doubts."""
    names = [name for text in doubts if not pd.isna(text) for name in str(text).split("; ") if name]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return "; ".join(f"{name} ({count} of {len(doubts)})" for name, count in counts.items()) or None


def _spread(times: StepTimes) -> dict[Key, float]:
    """Return the interquartile range of each trial's timed steps over their median."""
    by_trial = times.by_trial
    spread = (by_trial["q3_s"] - by_trial["q1_s"]) / by_trial["step_median_s"]
    return dict(zip(times.trials.tolist(), spread.astype(float).tolist(), strict=True))
