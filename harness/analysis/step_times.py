"""Steps -> their values by trial and by cell, in one pass over up to millions of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pandas as pd

from harness.analysis.common import KEYS, TrialKey, grouped, rows_of, trial_key

STALL_RATIO, STALL_S = 10.0, 2.0
"""A step is stalled if it exceeds the first times its trial's median, and the second in seconds."""


@dataclass(frozen=True)
class StepTimes:
    """The timed steps of each trial.

    ``trials``: (trial id, attempt) of each; ``column``: the values of a column of ``steps``, one array per trial, NaN
    if unknown.
    """

    trials: pd.MultiIndex
    column: Callable[[str], Sequence[np.ndarray]]

    @cached_property
    def by_trial(self) -> pd.DataFrame:
        """One row a trial: the quartiles of its step times, and the fraction of them spent waiting for data.

        That is of each step's longest wait and its slowest rank, as recorded or, with ``keep_steps: all``, found here.
        """
        quartiles = [np.quantile(step_s, (0.25, 0.5, 0.75)) for step_s in self.column("step_s")]
        values = np.array(quartiles, dtype=float).reshape(-1, 3)
        frame = pd.DataFrame(values, columns=["q1_s", "step_median_s", "q3_s"], index=self.trials)
        names = ("wait_s", "step_s", "mean_s", "rank")
        fractions = []
        for wait_s, step_s, mean_s, rank in zip(*map(self.column, names), strict=True):
            ranks = len(np.unique(rank)) if np.isnan(mean_s[0]) else 1  # the steps of each rank stand together
            longest_s, slowest_s = (np.fmax.reduce(each.reshape(ranks, -1)) for each in (wait_s, step_s))
            fractions.append(np.nansum(longest_s) / slowest_s.sum())
        return frame.assign(wait_fraction=np.array(fractions, dtype=float))

    @cached_property
    def stalled(self) -> set[TrialKey]:
        """The (trial id, attempt) of trials with a stalled step."""
        limits = np.maximum(STALL_S, STALL_RATIO * self.by_trial["step_median_s"].to_numpy(dtype=float))
        longest = [float(np.fmax.reduce(step_s, initial=0.0)) for step_s in self.column("step_s")]
        return {key for key, most, limit in zip(self.trials, longest, limits, strict=True) if most > limit}

    def of_cells(self, trials: pd.DataFrame, column: str) -> dict[str, np.ndarray]:
        """Return the values of these trials' timed steps in a column of ``steps``, by ``cell_id``."""
        values = dict(zip(self.trials, self.column(column), strict=True))
        known = [row for row in rows_of(trials[[*KEYS, "cell_id"]]) if trial_key(row) in values]
        cells = grouped(known, lambda row: str(row.cell_id))
        return {cell_id: np.concatenate([values[trial_key(row)] for row in rows]) for cell_id, rows in cells.items()}


def step_times(steps: pd.DataFrame) -> StepTimes:
    """Return the timed steps of a table of steps."""
    if steps.empty:
        return StepTimes(pd.MultiIndex.from_frame(steps[KEYS]), lambda name: [])
    starts = trial_starts(steps)
    keys = steps[KEYS].iloc[starts]
    if keys.duplicated().any():  # a trial's rows are not contiguous, as they are in files
        return step_times(steps.sort_values(KEYS, kind="stable", ignore_index=True))
    timed = ~steps["warmup"].to_numpy(dtype=bool, na_value=True)
    ends = np.cumsum(timed)[np.append(starts[1:], len(steps)) - 1]
    counts = np.diff(ends, prepend=0)

    @cache
    def column(name: str) -> list[np.ndarray]:
        values = steps[name].to_numpy(dtype=np.float64, na_value=np.nan)[timed]
        return [part for part, count in zip(np.split(values, ends[:-1]), counts, strict=True) if count]

    return StepTimes(pd.MultiIndex.from_frame(keys[counts > 0]), column)


def trial_starts(rows: pd.DataFrame) -> np.ndarray:
    """Return the positions of the rows at which another trial begins."""
    changed = np.zeros(len(rows), dtype=bool)
    changed[:1] = True
    for key in KEYS:
        values = rows[key].array
        changed[1:] |= np.asarray(values[1:] != values[:-1], dtype=bool)
    return np.flatnonzero(changed)
