"""Windows and parts -> the phases of a step, and the ledger of the run's time."""

from __future__ import annotations

import pandas as pd

from harness.analysis.common import Lines, Values, measured, order
from harness.analysis.stats import ENDS, mean_interval
from harness.plan.environment import RunEnvironment
from harness.record.frames import records
from harness.record.schema import DESCRIPTION, HOST_PHASES, LEDGER, PHASES
from harness.record.schema.recorded import COLLECTIVE_COLUMNS

NAMES = ("wait_s", "idle_s", "copy_s", "forward_s", "backward_s", "optimizer_s", "rest_s")
COLLECTIVES = [column.name for column in COLLECTIVE_COLUMNS]
HOST_NAMES = tuple(f"host_{name}" for name in NAMES if name != "idle_s")


def phases(trials: pd.DataFrame, windows: pd.DataFrame, pilot: int | None = None) -> pd.DataFrame:
    """Return one row a measured cell: seconds of its step by phase, the mean over ranks and blocks.

    Phases add up to the step. Source: the timed windows or, if timing the phases costs too much, separate windows.
    The collectives of dp and fsdp, from profiled steps, lie inside the phases, overlapped or not: they must not be
    added. The share of the wait for data has an interval over blocks. ``pilot``: the number of blocks that a rule
    decided from.
    """
    own = (
        measured(trials)
        .groupby("cell_id")[["launchers_id", *COLLECTIVES]]
        .agg(
            {"launchers_id": "first", **dict.fromkeys(COLLECTIVES, "mean")}  # in runs until version 3 the trial's own
        )
    )
    profiles = measured(trials, "profile").groupby("launchers_id")[COLLECTIVES].mean()
    both = own[COLLECTIVES].fillna(profiles.reindex(own["launchers_id"]).set_axis(own.index))
    profiled = both.to_dict("index")
    waits = _data_waits(trials, windows, pilot)
    return PHASES.frame(
        {**row, **{name: profiled[row["cell_id"]][name] for name in COLLECTIVES}, **waits[str(row["cell_id"])]}
        for row in _by_cell(trials, windows, NAMES)
    )


def _data_waits(trials: pd.DataFrame, windows: pd.DataFrame, pilot: int | None) -> dict[str, Values]:
    """Return the share of the step in which each cell's device waits for data: the mean over blocks, its interval.

    On a GPU the idle time before the step, for the host may wait while the device computes. A share has no value
    outside 0 to 1, so that the interval ends there.
    """
    merged = _phase_windows(trials, windows, NAMES)
    waited = merged["idle_s"].fillna(merged["wait_s"])
    columns = merged.assign(waited_s=waited, whole_s=merged[[*NAMES]].sum(axis=1))
    sums = columns.groupby(["cell_id", "block", "invocation"])[["waited_s", "whole_s"]].sum(min_count=1).reset_index()
    known = sums[sums["waited_s"].notna() & (sums["whole_s"] > 0)].drop_duplicates(["cell_id", "block"], keep="last")
    found: dict[str, Values] = {cell_id: {} for cell_id in merged["cell_id"]}
    for cell_id, blocks in known.groupby("cell_id"):
        shares = dict(zip(blocks["block"], (blocks["waited_s"] / blocks["whole_s"]).astype(float), strict=True))
        in_pilot = [share for block, share in shares.items() if pilot and block < pilot]
        estimate = mean_interval(list(shares.values()), pilot=in_pilot or None)
        low, high = (None if end is None else min(1.0, max(0.0, end)) for end in (estimate.low, estimate.high))
        ends = {**estimate.around(), "low": low, "high": high}
        found[str(cell_id)] = {
            "waits": estimate.value,
            "blocks": estimate.n,
            **{f"waits_{end}": ends[end] for end in ENDS},
        }
    return found


def host_phases(trials: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    """Return the host's seconds by phase while a GPU computes: a second clock, not to be added to the first."""
    return HOST_PHASES.frame(_by_cell(trials, windows, HOST_NAMES))


def _phase_windows(trials: pd.DataFrame, windows: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """Return the windows of measured trials that timed the phases, with the cell, block and invocation of each."""
    known = windows[windows["window_kind"].isin(["timed", "phases"]) & windows[f"{names[-1]}"].notna()]
    of_trial = measured(trials)[["trial_id", "attempt", "cell_id", "block", "invocation"]]
    return known.merge(of_trial, on=["trial_id", "attempt"], how="inner", suffixes=("", "_of_trial"))


def _by_cell(trials: pd.DataFrame, windows: pd.DataFrame, names: tuple[str, ...]) -> list[Values]:
    merged, counted = _phase_windows(trials, windows, names), measured(trials)
    sums = merged.groupby("cell_id")[["steps", "duration_s", *names]].sum(min_count=1)
    firsts = {row["cell_id"]: row for row in records(counted.drop_duplicates("cell_id")[["cell_id", *DESCRIPTION]])}
    rows = []
    for total in sums.reset_index().to_dict("records"):
        cell_id = total["cell_id"]
        marked = [name for name in names if not pd.isna(total[name])]
        seconds = {name: float(total[name]) / float(total["steps"]) for name in marked}
        axes = {axis: firsts[cell_id][axis] for axis in ("cell_id", *DESCRIPTION)}
        step_mean_s = sum(seconds.values())
        rows.append({**axes, "step_s": step_mean_s, **seconds})
    return sorted(rows, key=order)


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
