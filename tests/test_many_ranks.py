"""What a report of many ranks leaves out or holds otherwise changes no number: the same run, both ways.

Steps of the slowest rank alone, as recorded by default, against all ranks' steps; and some rows at a time.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from harness.analysis import phases, trials
from harness.analysis.results import TABLES, Results, load
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests.benchmarks import scale
from tests.benchmarks.thread_ranks import ThreadLauncher, make_up_ranks

QUANTILES = {"step_s", "step_p5_s", "step_p95_s"}
"""Quantiles of the recorded steps, which are others. So may be the doubt "wide spread", which no trial here has."""
CLOCKS = {"started_at", "actual_s", "device_hours", "busy_device_hours", "seconds"}


def kept(steps: str, folder: Path, ranks: int) -> Results:
    plan = scale.plan_of(ranks, 10, keep_steps=steps)
    run = RunFolder.create(folder / steps, plan.experiment, plan, "name: scale\n")
    Execution(plan, run, ThreadLauncher(plan, ranks), lambda event: None).run()
    return load(run.path)


def test_no_number_but_quantiles_of_steps_depends_on_which_ranks_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_up_ranks(40, monkeypatch.setattr)
    slowest, every = (kept(name, tmp_path, 8) for name in ("slowest", "all"))
    assert len(every.steps) > len(slowest.steps) > 0
    for name in ("scaling", "waterfall", "verdict", "noise", "leaders", "prediction", "phases", "windows", "cells"):
        assert len(getattr(slowest, name)), name
    differ: set[str] = set()
    for name in TABLES:
        one, other = (getattr(results, name) for results in (slowest, every))
        left = [column for column in one if column not in QUANTILES | CLOCKS]
        assert_frame_equal(one[left], other[left], check_exact=True, obj=name)
        differ |= {column for column in one if column in QUANTILES and not same(one[column], other[column])}
    assert differ == QUANTILES  # else the two runs are the same, and this test shows nothing


def test_no_table_depends_on_how_many_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_ranks(40, monkeypatch.setattr)
    results = kept("slowest", tmp_path, 4)
    expected = {name: getattr(results, name) for name in TABLES}
    for module in (phases, trials):
        monkeypatch.setattr(module, "ROWS", 3)
    few = load(results.folder.path)
    for name, table in expected.items():
        assert_frame_equal(getattr(few, name), table, check_exact=True, obj=name)


def same(one: pd.Series, other: pd.Series) -> bool:
    return bool((one.fillna(-1.0) == other.fillna(-1.0)).all())
