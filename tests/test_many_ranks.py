"""What a report of many ranks leaves out or holds otherwise changes no number: the same run, both ways.

Steps of the slowest rank alone, as recorded by default, against all ranks' steps, on made-up windows; and
some rows at a time.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from harness.analysis import doubts, phases, trials
from harness.analysis.results import TABLES, Results, load
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests.benchmarks import scale
from tests.benchmarks.thread_ranks import ThreadLauncher, make_up_ranks

QUANTILES = {"step_s", "step_p5_s", "step_p95_s"}
"""Quantiles of the recorded steps, which are others. So may be the doubt "wide spread", which no trial here has."""
MOST_BYTES = 5000
"""Limit of what a report's tables hold for a rank of a trial: 0.6 GiB for 240 trials of 512 ranks."""
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
    for name in ("scaling", "waterfall", "verdict", "noise", "leaders", "prediction", "phases", "windows", "cells"):
        assert len(getattr(slowest, name)), name
    assert differing(slowest, every) == QUANTILES  # else the two runs are the same, and this test shows nothing


def differing(slowest: Results, every: Results) -> set[str]:
    """Return which quantiles of steps differ; assert that nothing else does."""
    assert len(every.steps) > len(slowest.steps) > 0
    differ: set[str] = set()
    for name in TABLES:
        one, other = (getattr(results, name) for results in (slowest, every))
        left = [column for column in one if column not in QUANTILES | CLOCKS]
        assert_frame_equal(one[left], other[left], check_exact=True, obj=name)
        differ |= {column for column in one if column in QUANTILES and not same(one[column], other[column])}
    return differ


def test_no_table_depends_on_how_many_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_ranks(40, monkeypatch.setattr)
    results = kept("slowest", tmp_path, 4)
    expected = {name: getattr(results, name) for name in TABLES}
    for module in (doubts, phases, trials):
        monkeypatch.setattr(module, "ROWS", 3)
    few = load(results.folder.path)
    for name, table in expected.items():
        assert_frame_equal(getattr(few, name), table, check_exact=True, obj=name)


@pytest.mark.slow
def test_tables_hold_few_bytes_of_each_rank_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_ranks(40, monkeypatch.setattr)
    for module in (doubts, phases, trials):
        monkeypatch.setattr(module, "ROWS", 500)  # what a part takes for a moment is the same for few ranks and many

    def peak_and_rows(ranks: int) -> tuple[int, int]:
        path = kept("slowest", tmp_path / str(ranks), ranks).folder.path
        tracemalloc.start()
        try:
            results = load(path)
            made = [getattr(results, name) for name in TABLES]
            return tracemalloc.get_traced_memory()[1], len(results.ranks) if made else 0
        finally:
            tracemalloc.stop()

    (few, rows_of_few), (many, rows_of_many) = peak_and_rows(8), peak_and_rows(64)
    assert (many - few) / (rows_of_many - rows_of_few) < MOST_BYTES


def same(one: pd.Series, other: pd.Series) -> bool:
    return bool((one.fillna(-1.0) == other.fillna(-1.0)).all())
