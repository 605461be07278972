"""Ranks and windows of a trial: recorded beside its line, read back with it, from raw/ or gathered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import RunFolderError
from harness.plan.planner import make_plan
from harness.plan.trial import Trial, TrialResult
from harness.record.folder import RunFolder
from harness.record.schema import RAW
from tests.conftest import Make, laptop
from tests.records import rank_row

NOWHERE: Any = {"attempt": 1, "invocation": 0, "group_id": "b0-g0", "position": 0}
WINDOW: Any = {"rank": 0, "window": 0, "window_kind": "timed", "duration_s": 1.0, "steps": 2, "weight": 16.0}


@pytest.fixture
def trials(make_experiment: Make) -> tuple[Trial, ...]:
    return tuple(make_plan(make_experiment({"per_device_batch_size": [8, 16]}), laptop()).trials)


@pytest.fixture
def folder(make_experiment: Make, tmp_path: Path) -> RunFolder:
    experiment = make_experiment({"per_device_batch_size": [8, 16]})
    return RunFolder.create(tmp_path, experiment, make_plan(experiment, laptop()), "name: test\n")


@pytest.fixture
def file(folder: RunFolder, trials: tuple[Trial, ...]) -> Path:
    """Return the file by rank of the one recorded trial, which has two ranks and a window of each."""
    windows = [{**WINDOW, "rank": rank} for rank in (0, 1)]
    result = TrialResult(trials[0].id, "ok", ranks=[rank_row(0), rank_row(1)], windows=windows)  # type: ignore[list-item]
    folder.append(trials[0], result, NOWHERE)
    return folder.path / "raw" / f"{trials[0].id}-1-ranks.json"


def test_a_line_has_the_numbers_and_is_read_with_the_rows(folder: RunFolder, file: Path) -> None:
    content = json.loads(file.read_text())
    on_disk = json.loads((folder.path / "trials.jsonl").read_text())
    assert (on_disk["ranks"], on_disk["windows"]) == (2, 2)
    (line,) = folder.lines()
    assert [row["rank"] for row in line["ranks"]] == [0, 1] == [row["rank"] for row in line["windows"]]
    assert content == {"ranks": line["ranks"], "windows": line["windows"]}


def test_a_folder_that_is_passed_on_without_raw_reads_the_gathered_rows(folder: RunFolder, file: Path) -> None:
    lines = folder.lines()
    folder.compact({table.name: getattr(folder, table.name)(lines) for table in RAW}, lines)
    file.unlink()
    assert folder.lines() == lines


def test_a_trial_without_ranks_has_no_file_and_removes_one_of_an_attempt_without_a_line(
    folder: RunFolder, trials: tuple[Trial, ...]
) -> None:
    left = folder.path / "raw" / f"{trials[1].id}-1-ranks.json"
    left.write_text("{}")
    folder.append(trials[1], TrialResult(trials[1].id, "skipped", "the time is up"), NOWHERE)
    assert not left.exists()
    assert [(line["ranks"], line["windows"]) for line in folder.lines()] == [([], [])]


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (Path.unlink, "No such file"),
        (lambda file: file.write_text(""), "JSON"),
        (lambda file: file.write_text("[]"), "expected a JSON object"),
        (edited(lambda facts: facts["ranks"].pop()), "it has {'ranks': 1, 'windows': 2}; trials.jsonl says"),
        (edited(lambda facts: facts.update(windows=3)), "windows: Input should be a valid list"),
        (edited(lambda facts: facts.update(windows=[1, 2])), "windows.0: Input should be a valid dict"),
        (edited(lambda facts: facts["windows"][0].pop("duration_s")), "windows.0.duration_s: Field required"),
        (edited(lambda facts: facts["windows"][0].update(weight="many")), "windows.0.weight: Input should be"),
        (edited(lambda facts: facts["ranks"][0].update(threads=10**30)), "64 bits"),
        (edited(lambda facts: facts.pop("ranks")), "ranks: Field required"),
    ],
)
def test_damage_is_one_error_with_the_name_of_the_file(
    folder: RunFolder, file: Path, damage: Callable[[Path], object], problem: str
) -> None:
    damage(file)
    with pytest.raises(RunFolderError) as caught:
        folder.lines()
    assert str(caught.value).startswith(f"{file}: is damaged or incomplete (") and problem in str(caught.value)


@pytest.mark.parametrize("name", ["ranks", "windows"])
def test_a_line_with_another_number_of_rows_is_damaged(folder: RunFolder, file: Path, name: str) -> None:
    lines = folder.path / "trials.jsonl"
    lines.write_text(lines.read_text().replace(f'"{name}":2', f'"{name}":"x"'))
    with pytest.raises(RunFolderError, match=file.name):
        folder.lines()
