"""Every run below a folder as one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import harness
from harness.errors import RunFolderError
from harness.plan.cell import Cell
from harness.record.schema import HISTORY
from tests.conftest import Make
from tests.run_folders import NODE, make_run

GRID = {"model": "resnet8", "strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}


def rate(factor: float) -> Callable[[Cell, int], float]:
    return lambda cell, block: 100.0 * factor * cell.devices


@pytest.fixture(scope="module")
def place(make_experiment: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, of which the last one has another torch, and one that is damaged."""
    place = tmp_path_factory.mktemp("history")
    experiment = make_experiment(GRID, throughput={"blocks": 1})
    new = {**NODE, "packages": {"torch": "2.16.0"}}
    make_run(place / "b", experiment, rate(3.0), started_at=1.7e9 + 2, node=new, invocation={"git_commit": "b" * 40})
    make_run(place / "a", experiment, rate(1.0), started_at=1.7e9)
    make_run(place, experiment, rate(2.0), started_at=1.7e9 + 1)
    damaged = make_run(place, experiment, rate(1.0), started_at=1.7e9 + 3)
    (damaged / "trials.jsonl").write_text("damaged\n")
    return place


def test_history_has_one_row_a_run_and_cell_by_start_with_the_changes_since_the_run_before(place: Path) -> None:
    history = harness.load_history(place)
    assert history.columns.tolist() == HISTORY.names
    ddp = history[history["devices"] == 2]
    assert ddp["throughput_per_s"].tolist() == pytest.approx([200.0, 400.0, 600.0])
    assert ddp["started_at"].tolist() == [1.7e9, 1.7e9 + 1, 1.7e9 + 2]
    assert ddp["speedup"].tolist() == pytest.approx([2.0] * 3) and len(history) == 9
    changes = ("git commit aaaaaaaaaaaa -> bbbbbbbbbbbb", "torch 2.15.0 -> 2.16.0")
    assert ddp["changes"].tolist() == [(), (), changes]
    first, second, third = ddp["environment"]
    assert first == second != third
    ((path, reason),) = history.attrs["unread"].items()
    assert path in reason and "trials.jsonl" in reason


def test_labels_name_what_varies_over_all_runs(place: Path, make_experiment: Make, tmp_path: Path) -> None:
    assert set(harness.load_history(place)["label"]) == {"single x1", "ddp x1", "ddp x2"}
    for model in ("resnet8", "resnet14"):
        make_run(tmp_path, make_experiment({**GRID, "model": model}, throughput={"blocks": 1}), rate(1.0))
    labels = harness.load_history(tmp_path)["label"]
    assert labels.nunique() == 6 and "ddp x2 · resnet14" in set(labels)


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunFolderError, match="no run folder is below it"):
            harness.load_history(folder)
