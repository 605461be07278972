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
LEAST_BETTER = 0.6
"""How far off a prediction may be, beside the ideal, which is 0.7 off; errors are judged by the benchmark, which has
the machine alone."""


def test_eight_ranks_take_as_long_as_predicted_from_four(tmp_path: Path) -> None:
    results = measure([TWO_TIERS], 1, tmp_path, most=8, links_seconds=4.0)
    assert set(results.trials["outcome"]) == {"ok"}
    (row,) = judged(results)
    assert row["marks"] == ("emulated",)
    if most_foreign_cores(results) > FOREIGN_CORES:  # eight ranks, and the links' largest messages, wait for processors
        return
    assert row["refusal"] is None and row["step_s"] > 0 and row["low"] is None  # of one block without an interval
    assert 0.1 * row["step_s"] < row["exposed_s"]  # the links are too slow to hide all of it
    ideal = abs(row["ideal_s"] / row["measured_s"] - 1)
    assert abs(row["error"]) < LEAST_BETTER * ideal, row
