"""Results: a run folder's tables by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import harness
from harness.analysis.results import TABLES

FOLDER = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"


def test_a_table_is_made_once_and_by_its_name() -> None:
    results = harness.load(FOLDER)
    assert results.scaling is results.scaling
    assert set(TABLES) <= set(dir(results))


def test_a_table_that_does_not_exist_is_an_error_with_the_names() -> None:
    with pytest.raises(AttributeError, match="no table 'agreement'; allowed: trials, cells, scaling, "):
        _ = harness.load(FOLDER).agreement
