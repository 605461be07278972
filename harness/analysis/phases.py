"""Windows and parts -> seconds a step of each trial, the phases of a step, and the ledger of the run's time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.common import (
    KEYS,
    Lines,
    Row,
    Rows,
    TrialKey,
    Values,
    grouped,
    measured,
    order,
    rows_of,
)
from harness.analysis.stats import mean_interval
from harness.analysis.step_times import trial_starts
from harness.plan.run_environment import RunEnvironment
from harness.record.frames import records
from harness.record.schema import DESCRIPTION, HOST_PHASES, LEDGER, PHASES

NAMES = ("wait_s", "idle_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "rest_s")
HOST_NAMES = tuple(f"host_{name}" for name in NAMES if name != "idle_s")


def phases(trials: pd.DataFrame, windows: pd.DataFrame, pilot: int | None = None) -> pd.DataFrame:
    """Return one row a measured cell: seconds of its step by phase, the mean over ranks and blocks.

    Phases add up to the step. Source: the timed windows or, if timing the phases costs too much, separate windows.
    ``waits``: the share of the step in which the device waits for data, the mean over blocks with its interval, which
    ends at 0 and 1. ``pilot``: the number of blocks that a rule decided from.
    """
    merged = _phase_windows(trials, windows, NAMES)
    columns = merged.assign(waited_s=_waited_s(merged), whole_s=merged[[*NAMES]].sum(axis=1))
    sums = columns.groupby(["cell_id", "block", "invocation"])[["waited_s", "whole_s"]].sum(min_count=1).reset_index()
    known = sums[sums["waited_s"].notna() & (sums["whole_s"] > 0)].drop_duplicates(["cell_id", "block"], keep="last")
    waits: dict[str, Values] = {}
    for cell_id, blocks in known.groupby("cell_id"):
        shares = (blocks["waited_s"] / blocks["whole_s"]).astype(float)
        estimate = mean_interval(shares.tolist(), pilot=int((blocks["block"] < (pilot or 0)).sum()))
        low, high = (None if end is None else min(1.0, max(0.0, end)) for end in (estimate.low, estimate.high))
        ends = replace(estimate, low=low, high=high).around("waits")
        waits[str(cell_id)] = {"waits": estimate.value, "blocks": estimate.n, **ends}
    return PHASES.frame({**row, **waits.get(str(row["cell_id"]), {})} for row in _by_cell(trials, merged, NAMES))


def host_phases(trials: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    """Return the host's seconds by phase while a GPU computes: a second clock, not to be added to the first."""
    return HOST_PHASES.frame(_by_cell(trials, _phase_windows(trials, windows, HOST_NAMES), HOST_NAMES))


def _waited_s(windows: pd.DataFrame) -> pd.Series[float]:
    """Return the seconds of each window in which a device waits for data: on a CPU the host's wait, on a GPU the part
    of it with an idle stream, for the host may wait while the device computes.
    """
    return windows["wait_s"].fillna(windows[["idle_s", "host_wait_s"]].min(axis=1, skipna=False))


def _phase_windows(trials: pd.DataFrame, windows: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """Return the windows of measured trials that timed the phases, with the cell, block and invocation of each."""
    known = windows[windows["window_kind"].isin(["timed", "phases"]) & windows[names[-1]].notna()]
    of_trial = measured(trials)[[*KEYS, "cell_id", "block", "invocation"]]
    return known.merge(of_trial, on=KEYS, how="inner", suffixes=("", "_of_trial"))


def _by_cell(trials: pd.DataFrame, merged: pd.DataFrame, names: tuple[str, ...]) -> list[Row]:
    """Return the seconds a step of each cell by phase, and their sum, from the windows that timed the phases."""
    sums = merged.groupby("cell_id")[["steps", *names]].sum(min_count=1)
    seconds = sums[[*names]].div(sums["steps"], axis="index")
    step_s = sum(seconds[name].fillna(0.0) for name in names)
    firsts = measured(trials).drop_duplicates("cell_id")[["cell_id", *DESCRIPTION]]
    return sorted(rows_of(seconds.assign(step_s=step_s).reset_index().merge(firsts, on="cell_id")), key=order)


def ledger(lines: Lines, environment: RunEnvironment) -> pd.DataFrame:
    """Return the run's time by part: of trials, of worker groups outside their trials, of invocations."""
    rows = []
    in_group: dict[tuple[int, str | None], float] = {}
    for line in lines:
        key = (line["invocation"], line["group_id"])
        in_group[key] = in_group.get(key, 0.0) + (line["trial_s"] or 0.0)
        where = {"level": "trial", "invocation": line["invocation"], "group_id": line["group_id"]}
        for part, seconds in line["parts"].items():
            rows.append({**where, "trial_id": line["trial_id"], "part": part, "seconds": seconds})
    groups: dict[int, float] = {}
    for group in environment.get("groups", []):
        where = {"level": "group", "invocation": group["invocation"], "group_id": group["group_id"]}
        groups[group["invocation"]] = groups.get(group["invocation"], 0.0) + group["whole_s"]
        parts = dict(group.get("parts") or {})
        left = group["whole_s"] - in_group.pop((group["invocation"], group["group_id"]), 0.0) - sum(parts.values())
        rest = "between trials" if "teardown" in parts else "between trials and end"
        for part, seconds in {**parts, rest: left}.items():
            rows.append({**where, "part": part, "seconds": seconds})
    for number, invocation in enumerate(environment.get("invocations", [])):
        if "wall_s" in invocation:
            beside = invocation["wall_s"] - groups.get(number, 0.0)
            rows.append({"level": "run", "invocation": number, "part": "plan, Ray, records", "seconds": beside})
    return LEDGER.frame(rows)


ROWS = 50_000
WINDOW_COLUMNS = (
    *("rank", "window", "window_kind", "duration_s", "steps"),
    *("wait_s", "idle_s", "host_wait_s", "in_turn_s", "late_s"),
)


@dataclass(frozen=True)
class Timing:
    """Seconds a step of one trial: of the slowest rank, and its wait for data.

    Without the wait: ``alone_s`` by rank without gradient exchange, nor its wait for later ranks in collectives of the
    user's own code; ``slowest_s`` of each step's slowest rank without exchange, ``together_s`` of the slowest rank with
    it; None for a strategy whose exchange cannot be taken out.
    ``wait_fraction``: the wait over the time of the windows in which it was marked; None if it was marked in none.
    """

    step_mean_s: float
    wait_s: float
    wait_fraction: float | None
    alone_s: Mapping[int, float]
    slowest_s: float | None
    together_s: float | None

    @property
    def net_s(self) -> float:
        return self.step_mean_s - self.wait_s


def timings(windows: pd.DataFrame) -> dict[TrialKey, Timing]:
    """Return the timing of every trial that was timed, by its id and attempt. The rows of a trial stand together."""
    found: dict[TrialKey, Timing] = {}
    # of whole trials, about ROWS windows at a time: a part takes several times the memory of its rows
    starts = trial_starts(windows)
    keys = [(str(row.trial_id), int(row.attempt)) for row in rows_of(windows[KEYS].iloc[starts])]
    trial = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(windows)))
    after = np.searchsorted(starts, np.arange(0, len(windows), ROWS))  # of the trials that begin there or later
    for first, last in pairwise([*np.unique(starts[after[after < len(starts)]]), len(windows)]):
        part = windows[[*WINDOW_COLUMNS]].iloc[first:last].reset_index(drop=True)
        known = part.assign(
            trial=trial[first:last],
            lost_s=_waited_s(part).fillna(0.0),
            is_marked=part["wait_s"].notna() | part["idle_s"].notna(),
            in_turn_s=part["in_turn_s"].fillna(0.0),
            late_s=part["late_s"].fillna(0.0),
        )
        of_trials = {trial: _timing(rows) for trial, rows in grouped(_of_all_ranks(known), _trial).items()}
        timed = {trial: timing for trial, timing in of_trials.items() if timing}
        alone = _alone(known, {trial: timing.wait_s for trial, timing in timed.items()})
        found |= {keys[trial]: replace(timing, **alone.get(trial, {})) for trial, timing in timed.items()}
    return found


def _trial(row: Row) -> int:
    return int(row["trial"])


def _of_all_ranks(windows: pd.DataFrame) -> Rows:
    """Return each window over its ranks: the time of the slowest, and the wait of the one that waited longest.

    Windows begin together, so the slowest rank ends each; and ranks that exchange gradients end a step together,
    whichever of them made the others wait.
    """
    known = windows[windows["window_kind"].isin(["timed", "phases", "together"])]
    by_window = known.groupby(["trial", "window_kind", "window"], sort=False)
    slowest, waiting = (windows.loc[by_window[name].idxmax()] for name in ("duration_s", "lost_s"))
    return rows_of(slowest.assign(lost_s=waiting["lost_s"].array, is_marked=waiting["is_marked"].array))


def _timing(rows: Rows) -> Timing | None:
    """Return the timing of a trial from its windows over their ranks; None without a timed one."""
    kinds = grouped(rows, lambda row: row["window_kind"])
    timed, phases, together = (kinds.get(kind, []) for kind in ("timed", "phases", "together"))
    if not timed:
        return None
    marked = timed if any(window["is_marked"] for window in timed) else phases
    lost_s = sum(window["lost_s"] for window in marked)
    wait_s = lost_s / sum(window["steps"] for window in marked) if marked else 0.0
    is_known = any(window["is_marked"] for window in marked)
    return Timing(
        step_mean_s=sum(window["duration_s"] for window in timed) / sum(window["steps"] for window in timed),
        wait_s=wait_s,
        wait_fraction=lost_s / sum(window["duration_s"] for window in marked) if is_known else None,
        alone_s={},
        slowest_s=None,
        together_s=_net_step_s(together, wait_s) if together else None,
    )


def _alone(windows: pd.DataFrame, wait_s: Mapping[int, float]) -> dict[int, dict[str, Any]]:
    """Return ``alone_s`` and ``slowest_s`` of trials with windows without exchange; ``wait_s``: the usual wait of each.

    The rows have each rank of each window: hundreds of a trial, which are reduced as a frame.
    """
    known = windows[(windows["window_kind"] == "alone") & windows["trial"].isin(list(wait_s))]
    usual_s = known["steps"] * known["trial"].map(wait_s)
    known = known.assign(left_s=known["duration_s"] - known["lost_s"].where(known["is_marked"], usual_s))
    known = known.assign(net_s=known["left_s"] / known["steps"])
    by_window = known.groupby(["trial", "window"], sort=False)
    each = by_window.agg(steps=("steps", "first"), net_s=("net_s", "max"), in_turn_s=("in_turn_s", "first"))
    sums = each.assign(slowest_s=each["steps"] * each["net_s"] + each["in_turn_s"]).groupby("trial").sum()
    slowest_s = (sums["slowest_s"] / sums["steps"]).astype(float).to_dict()
    of_ranks = known.groupby(["trial", "rank"], sort=False)[["left_s", "late_s", "steps"]].sum().reset_index()
    of_ranks = of_ranks.assign(step_s=(of_ranks["left_s"] - of_ranks["late_s"]) / of_ranks["steps"])
    alone_s: dict[int, dict[int, float]] = {}
    for row in records(of_ranks):
        alone_s.setdefault(row["trial"], {})[row["rank"]] = row["step_s"]
    return {trial: {"alone_s": step_s, "slowest_s": slowest_s[trial]} for trial, step_s in alone_s.items()}


def _net_step_s(windows: Rows, usual_wait_s: float) -> float:
    """Return the seconds a step without the wait for data: that of the trial's other windows, if these mark none."""
    steps = sum(window["steps"] for window in windows)
    waits = (window["lost_s"] if window["is_marked"] else window["steps"] * usual_wait_s for window in windows)
    return float((sum(window["duration_s"] for window in windows) - sum(waits)) / steps) if steps else math.nan
