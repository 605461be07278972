"""A study over emulated links of two tiers, measured on 1, 2 and 4 ranks: 8 ranks are predicted, then measured.

One of a single tier is among those of tests/benchmarks/prediction.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.doubts import FOREIGN_CORES
from tests.benchmarks.emulated_links import why_not
from tests.benchmarks.prediction import Study, judged, measure
from tests.processes import most_foreign_cores

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]

TWO_TIERS = Study(2, 300.0, 60.0, 2.0, 1, 1.0, 0.01, 0.02, 0.3, 2)
MOST_OFF, MOST_OFF_BESIDE = 0.15, 0.3
"""The benchmark judges errors; the second bound is for a machine that other processes keep busy. Ideal is 0.7 off."""


def test_eight_ranks_take_as_long_as_predicted_from_four(tmp_path: Path) -> None:
    results = measure([TWO_TIERS], 1, tmp_path, most=8, links_seconds=4.0)
    assert set(results.trials["outcome"]) == {"ok"}
    (row,) = judged(results)
    assert row["refusal"] is None and row["marks"] == ("emulated",)
    alone = most_foreign_cores(results) <= FOREIGN_CORES
    assert abs(row["error"]) < (MOST_OFF if alone else MOST_OFF_BESIDE), row
    assert row["low"] < row["step_s"] < row["high"] < 1.5 * row["step_s"]
    assert 0.1 * row["step_s"] < row["exposed_s"]  # the links are too slow to hide all of it
    ideal = abs(row["ideal_s"] / row["measured_s"] - 1)
    assert abs(row["error"]) < ideal
