"""Stalled steps: which they are, the ranks that waited, a cause that a counter shows, throughput without them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.doubts import doubts
from harness.analysis.stalls import stalls
from harness.analysis.steps import step_times
from harness.record.schema import STEPS
from harness.report.tables.evidence import stalls_table
from tests.records import line

STEPS_OF_A_WINDOW = 10


def recorded(step_s: dict[tuple[int, int, int], float], *, wait_s: float = 0.0, **rank: Any) -> list[Any]:
    """A trial of two ranks and two timed windows of ten steps of 0.1 s, but for these (rank, window, step)."""
    places = [(r, w, s) for r in range(2) for w in range(3) for s in range(STEPS_OF_A_WINDOW)]
    trial = {"trial_id": "ddp2-b0", "attempt": 1}
    steps = [
        {**trial, "rank": r, "window": w, "step": s, "warmup": w == 0, "step_s": step_s.get((r, w, s), 0.1)}
        | {"wait_s": wait_s if (r, w, s) in step_s else 0.0}
        for r, w, s in places
    ]
    fixed = {"steps": STEPS_OF_A_WINDOW, "weight": 50.0}
    windows = [
        {**fixed, "rank": r, "window": w, "window_kind": "timed" if w else "warmup", "duration_s": sum(seconds)}
        for r in range(2)
        for w in range(3)
        for seconds in ([row["step_s"] for row in steps if (row["rank"], row["window"]) == (r, w)],)
    ]
    one = line("ddp2", rates=(1.0, 1.0), windows=windows)
    one["ranks"][1] |= rank
    return [one, STEPS.frame(steps)]


def table(one: dict[str, Any], steps: pd.DataFrame) -> pd.DataFrame:
    times, lines = step_times(steps), [one]
    trials = trial_tables.trials(lines, times)
    return stalls(trials, trial_tables.windows(lines), trial_tables.ranks(lines), steps, times)


def doubts_of(one: dict[str, Any], steps: pd.DataFrame) -> tuple[str, ...]:
    times, lines = step_times(steps), [one]
    trials = trial_tables.trials(lines, times)
    names: tuple[str, ...]
    (names,) = doubts(trials, times, trial_tables.windows(lines), trial_tables.ranks(lines), {})
    return names


STALL = {(0, 1, 3): 20.0, (1, 1, 3): 21.0}


def test_a_stalled_window_has_its_seconds_and_ranks_and_the_throughput_without_it() -> None:
    (row,) = table(*recorded(STALL)).to_dict("records")
    assert (row["window"], row["waiting_ranks"], row["stalled_s"]) == (1, "0, 1", 21.0)
    assert row["step_median_s"] == pytest.approx(0.1)
    assert row["throughput_per_s"] == pytest.approx(200 / (21.9 + 1.0))  # all samples, over the slowest rank's time
    assert row["unstalled_throughput_per_s"] == pytest.approx(100.0)
    assert pd.isna(row["cause"])
    (shown,) = stalls_table(table(*recorded(STALL))).rows
    assert shown.cells[3:] == ("21 s", "0.1", "0, 1", "not known", "8.73", "100")


def test_the_trial_counts_and_has_the_doubt() -> None:
    one, steps = recorded(STALL)
    assert one["outcome"] == "ok" and "stalled" in doubts_of(one, steps)
    times = step_times(steps)
    assert len(trial_tables.cells(trial_tables.trials([one], times).assign(doubts=[()]), times)) == 1


@pytest.mark.parametrize(
    "step_s",
    [
        {},
        {(0, 1, 3): 1.9},  # 19 times the median, yet under 2 s
        {(0, 0, 3): 20.0},  # warm-up
        {(r, w, s): 3.0 for r in range(2) for w in range(3) for s in range(STEPS_OF_A_WINDOW)},  # all are slow
    ],
)
def test_what_is_no_stall(step_s: dict[tuple[int, int, int], float]) -> None:
    one, steps = recorded(step_s)
    assert table(one, steps).empty and "stalled" not in doubts_of(one, steps)


def test_if_every_window_stalled_there_is_no_throughput_without() -> None:
    both = table(*recorded({(0, 1, 3): 20.0, (0, 2, 0): 5.0}))
    assert both["window"].tolist() == [1, 2] and both["waiting_ranks"].tolist() == ["0", "0"]
    assert both["unstalled_throughput_per_s"].isna().all()


def test_a_cause_is_named_only_if_a_counter_shows_it() -> None:
    assert table(*recorded(STALL, wait_s=15.0))["cause"].tolist() == ["waited for data (rank 0, 1)"]
    assert table(*recorded(STALL, wait_s=5.0))["cause"].isna().all()
    swapped = table(*recorded(STALL, swapped_bytes=4096, throttled="sw thermal slowdown"))
    assert swapped["cause"].tolist() == ["its node swapped memory (rank 1); clocks throttled (rank 1)"]
    assert table(*recorded(STALL, swapped_bytes=0, throttled=""))["cause"].isna().all()
    assert table(*recorded(STALL, swapped_bytes=0, throttled="held by power"))["cause"].isna().all()
