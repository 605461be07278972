"""Steps -> how long those of each trial and cell took: one pass over what may be millions of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from pandas.core.groupby import SeriesGroupBy


@dataclass(frozen=True)
class StepTimes:
    """Seconds of every timed step, data included, and of its wait for data; NaN where that is not known.

    ``trials`` has one (trial id, attempt) a trial, and ``trial`` for each step the place of its own in it.
    """

    trials: pd.MultiIndex
    trial: np.ndarray
    step_s: np.ndarray
    wait_s: np.ndarray

    @cached_property
    def by_trial(self) -> pd.DataFrame:
        """One row a trial: the quartiles of its steps, and what part of them was waiting for data."""
        steps = pd.Series(self.step_s).groupby(self.trial)
        quartiles = steps.quantile(np.array([0.25, 0.75])).unstack()
        waits = pd.Series(self.wait_s).groupby(self.trial).sum()
        columns = {
            "q1_s": quartiles.get(0.25),
            "median_s": steps.median(),
            "q3_s": quartiles.get(0.75),
            "wait_fraction": waits / steps.sum(),
        }
        return pd.DataFrame(columns).set_axis(self.trials)

    def of_cells(self, trials: pd.DataFrame) -> SeriesGroupBy[Any, Any]:
        """The seconds of the steps of these trials, by ``cell_id``."""
        cells = trials.set_index(["trial_id", "attempt"])["cell_id"].reindex(self.trials)
        number, names = pd.factorize(cells)
        of_step = number[self.trial]
        known = of_step >= 0
        by = pd.CategoricalIndex(pd.Categorical.from_codes(of_step[known], categories=names))
        return pd.Series(self.step_s[known]).groupby(by, observed=True)


def step_times(steps: pd.DataFrame) -> StepTimes:
    """The timed steps of a table of steps."""
    timed = ~steps["warmup"].to_numpy(dtype=bool, na_value=True)
    ids, names = pd.factorize(steps["trial_id"])
    attempts = steps["attempt"].to_numpy(dtype=np.int64)
    most = int(attempts.max(initial=0)) + 1
    trial, keys = pd.factorize((ids * most + attempts)[timed])
    return StepTimes(
        pd.MultiIndex.from_arrays([names[keys // most], keys % most], names=["trial_id", "attempt"]),
        trial,
        *(steps[name].to_numpy(dtype=np.float64, na_value=np.nan)[timed] for name in ("step_s", "wait_s")),
    )
