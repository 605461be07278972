"""Step times by trial and by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis import steps as steps_module
from harness.analysis.steps import quantiles, step_times
from harness.record.schema import STEPS


def step(
    trial_id: str, attempt: int, step_s: float, wait_s: float | None = 0.0, warmup: bool = False
) -> dict[str, Any]:
    return {"trial_id": trial_id, "attempt": attempt, "warmup": warmup, "step_s": step_s, "wait_s": wait_s}


TIMES = step_times(
    STEPS.frame(
        [
            step("b", 1, 9.0, warmup=True),
            step("b", 1, 4.0, 1.0),
            step("a", 2, 2.0),
            step("b", 1, 6.0, 1.0),
            step("a", 1, 7.0, None),
            step("b", 1, 5.0, 1.0),
            step("w", 1, 1.0, warmup=True),
        ]
    )
)


def test_each_attempt_has_the_quartiles_of_its_timed_steps_in_whatever_order_they_stand() -> None:
    by_trial = TIMES.by_trial
    assert sorted(by_trial.index) == [("a", 1), ("a", 2), ("b", 1)]  # the one with warm-up alone has none
    assert by_trial.loc[("b", 1)].tolist() == pytest.approx([4.5, 5.0, 5.5, 3.0 / 15.0])
    assert by_trial.loc[("a", 2), "step_median_s"] == 2.0


def test_only_the_trials_that_count_are_in_a_cells_steps_and_without_steps_there_are_none() -> None:
    counted = pd.DataFrame({"trial_id": ["a", "b", "c"], "attempt": [2, 1, 1], "cell_id": ["x", "y", "z"]})
    steps = {cell_id: values.tolist() for cell_id, values in TIMES.of_cells(counted).items()}
    assert steps == {"x": [2.0], "y": [4.0, 6.0, 5.0]}
    times = step_times(STEPS.frame([]))
    assert times.by_trial.empty
    assert times.of_cells(counted) == {}
    assert quantiles({}, (0.5,)) == [{}]


def test_quantiles_interpolate_between_neighbouring_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "BATCH", 1)
    values = {"x": np.array([3.0, 1.0, 2.0]), "y": np.array([5.0])}
    assert quantiles(values, (0.25, 0.5)) == [{"x": 1.5, "y": 5.0}, {"x": 2.0, "y": 5.0}]
