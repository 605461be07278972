"""The parts of a step as the tables of a run have them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from harness.analysis.prediction.observed import Size, net_step_times
from harness.analysis.steps import StepTimes


def test_steps_are_without_their_wait_for_data() -> None:
    trials = pd.MultiIndex.from_tuples([("waits", 1), ("unknown", 2)])
    steps = [np.array([0.3, 0.2]), np.array([0.5, 0.4])]
    times = StepTimes(trials, steps, [np.array([0.1, 0.0]), np.array([np.nan, np.nan])])
    found = net_step_times(times)
    assert found["waits", 1] == pytest.approx([0.2, 0.2]) and found["unknown", 2] == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize(
    ("size", "words"),
    [(Size(1, 1), "1 device"), (Size(4, 1), "4 devices"), (Size(64, 8), "64 devices on 8 nodes")],
)
def test_a_size_has_words(size: Size, words: str) -> None:
    assert size.words == words
