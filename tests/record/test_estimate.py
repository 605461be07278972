"""estimate.json: written before the run, and read with its types checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import RunFolderError
from harness.plan.planner import make_plan
from harness.record.estimate import Estimate, read_estimate, write_estimate
from harness.record.folder import RunFolder
from tests.conftest import Make, laptop

FIRST: Estimate = {"earlier": None, "devices": 2, "at_once": 1, "bound": "at least", "parts": []}


@pytest.fixture
def folder(make_experiment: Make, tmp_path: Path) -> RunFolder:
    plan = make_plan(make_experiment(), laptop())
    return RunFolder.create(tmp_path, plan.experiment, plan, "x")


def test_an_estimate_is_read_as_it_was_written(folder: RunFolder) -> None:
    assert read_estimate(folder) is None
    write_estimate(folder, FIRST)
    assert read_estimate(folder) == FIRST


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected a JSON object"),
        ("{}", "Field required"),
        (json.dumps({**FIRST, "devices": "many"}), "devices"),
        (json.dumps({**FIRST, "parts": [{"part": "cell"}]}), r"parts\.0"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(folder: RunFolder, text: str, problem: str) -> None:
    (folder.path / "estimate.json").write_text(text)
    with pytest.raises(RunFolderError, match=rf"estimate\.json.*{problem}"):
        read_estimate(folder)
