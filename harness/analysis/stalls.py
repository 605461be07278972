"""Stalls: timed steps that took many times as long as the others of their trial, such as over a link that was down.

A trial with one is measured and counts. The doubt ``stalled`` marks it, and the table has its throughput with and
without the windows in which it stalled.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.analysis.common import Record, Records, Values, columns_of, grouped, rows_of, trial_key
from harness.analysis.evidence import throttling
from harness.analysis.step_times import KEYS, STALL_RATIO, STALL_S, StepTimes
from harness.analysis.trials import throughput
from harness.record.schema import DESCRIPTION, STALLS

MOSTLY = 0.5
"""The fraction of a stalled step from which on its wait for data is the cause."""


Key = tuple[str, int]


def stalls(
    trials: pd.DataFrame, windows: pd.DataFrame, ranks: pd.DataFrame, steps: pd.DataFrame, times: StepTimes
) -> pd.DataFrame:
    """Return one row a timed window in which a rank had a stalled step."""
    by_window = grouped(rows_of(stalled_steps(steps, times)), lambda step: (trial_key(step), int(step.window)))
    stalled = {key for key, _ in by_window}
    of_trial = {trial_key(row): row for row in _of_trials(trials, stalled)}
    timed, counters = (grouped(_of_trials(frame, stalled), trial_key) for frame in (windows, ranks))
    without: dict[Key, float | None] = {}
    for key in stalled:
        left_out = {window for other, window in by_window if other == key}
        without[key] = throughput([vars(row) for row in timed.get(key, []) if row.window not in left_out])
    return STALLS.frame(
        {
            **columns_of(of_trial[key], *KEYS, "cell_id", *DESCRIPTION, "block", "unit", "throughput_per_s"),
            "window": window,
            **_measured(rows, counters.get(key, [])),
            "unstalled_throughput_per_s": without[key],
        }
        for (key, window), rows in by_window.items()
        if key in of_trial
    )


def stalled_steps(steps: pd.DataFrame, times: StepTimes) -> pd.DataFrame:
    """Return the timed steps that stalled, with the trial's median as ``step_median_s``."""
    long = steps[~steps.warmup.fillna(True).astype(bool) & (steps.step_s > STALL_S).fillna(False).astype(bool)]
    medians = times.by_trial[["step_median_s"]].rename_axis(KEYS).reset_index()
    merged = long.merge(medians, on=KEYS, how="inner", validate="many_to_one")
    return merged[merged["step_s"] > STALL_RATIO * merged["step_median_s"]]


def _of_trials(frame: pd.DataFrame, keys: set[Key]) -> list[Record]:
    """Return the rows of these trials, of all their attempts."""
    return rows_of(frame[frame["trial_id"].isin({trial_id for trial_id, _ in keys})])


def _measured(steps: Records, ranks: Records) -> Values:
    """Return what is known of the stalled steps of one window: their time on the slowest rank, ranks and cause."""
    longest: dict[int, float] = {}
    for step in steps:
        longest[step.step] = max(longest.get(step.step, 0.0), float(step.step_s))
    return {
        "step_median_s": float(steps[0].step_median_s),
        "stalled_s": sum(longest.values()),
        "waiting_ranks": _names(int(step.rank) for step in steps),
        "cause": _cause(steps, ranks),
    }


def _cause(steps: Records, ranks: Records) -> str | None:
    """Return what counters show; None if none shows anything."""
    waited = [step for step in steps if pd.notna(step.wait_s) and step.wait_s > MOSTLY * step.step_s]
    for_data = [int(step.rank if pd.isna(step.wait_rank) else step.wait_rank) for step in waited]
    swapped = [int(rank.rank) for rank in ranks if pd.notna(rank.swapped_bytes) and rank.swapped_bytes > 0]
    throttled = [int(rank.rank) for rank in ranks if throttling(vars(rank))]
    seen = {"waited for data": for_data, "its node swapped memory": swapped, "clocks throttled": throttled}
    return "; ".join(f"{what} (rank {_names(which)})" for what, which in seen.items() if which) or None


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))
