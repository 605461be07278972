"""Export to MLflow: what it consists of; complete and repeatable; one clear error for each way to fail."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from harness.analysis.results import Results, load
from harness.cli.commands import app
from harness.errors import ExportError
from harness.report.mlflow_export import (
    LONGEST_TAG,
    SETTINGS,
    MlflowRun,
    export_to_mlflow,
    mlflow_runs,
    tracking_uri,
)
from tests.conftest import EXAMPLE, Make
from tests.listening import free_port
from tests.run_folders import make_run

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")  # which takes seconds to import
TARGET = {"metric": "val_accuracy", "at_least": 0.8}


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, make_experiment: Make) -> Results:
    experiment = make_experiment({"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8})
    place = tmp_path_factory.mktemp("results")
    run = make_run(place, experiment, lambda cell, block: 100.0 * cell.devices + block)
    (run / "tables" / "cells.csv").write_text("a")
    return load(run)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "my store"


def client_of(store: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store.as_uri())


def runs(store: Path) -> list[Any]:
    client = client_of(store)
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def export_by_command(results: Results, target: object, *more: str) -> Result:
    return CliRunner().invoke(app, ["export", str(results.folder.path), "--mlflow", str(target), *more])


@pytest.mark.filterwarnings("ignore")  # MLflow's advice to use a database
def test_a_run_has_a_child_for_each_cell(results: Results, store: Path) -> None:
    said = export_to_mlflow(results, str(store))
    assert said.endswith(": 2 cells")
    (whole,) = [run for run in runs(store) if "mlflow.parentRunId" not in run.data.tags]
    cells = [run for run in runs(store) if run.data.tags.get("mlflow.parentRunId") == whole.info.run_id]
    assert sorted(run.info.run_name for run in cells) == ["ddp x2", "single x1"]
    (ddp,) = [run for run in cells if run.info.run_name == "ddp x2"]
    assert ddp.data.params["devices"] == "2" and ddp.data.metrics["speedup"] == pytest.approx(2, 0.1)
    assert {run.info.status for run in (whole, *cells)} == {"FINISHED"}
    times = {(run.info.start_time, run.info.end_time) for run in (whole, *cells)}
    assert times == {(1_700_000_000_000, 1_700_000_009_000)}
    client = client_of(store)
    assert [one.path for one in client.list_artifacts(whole.info.run_id)] == ["experiment.yaml", "tables"]
    assert [one.path for one in client.list_artifacts(whole.info.run_id, "tables")] == ["tables/cells.csv"]


@pytest.mark.filterwarnings("ignore")
def test_a_second_export_takes_the_place_of_the_first_wherever_the_folder_lies(
    results: Results, store: Path, tmp_path: Path
) -> None:
    export_to_mlflow(results, str(store))
    before = {run.info.run_id for run in runs(store)}
    moved = load(shutil.copytree(results.folder.path, tmp_path / "elsewhere"))
    assert export_to_mlflow(moved, str(store)).endswith(": 2 cells, in place of an earlier export")
    after = {run.info.run_id for run in runs(store)}
    assert len(after) == len(before) == 3 and not after & before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("earlier", [False, True], ids=["the first", "a later one"])
def test_an_export_that_fails_half_way_loses_nothing_and_can_be_repeated(
    results: Results, store: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    if earlier:
        export_to_mlflow(results, str(store))
    before = {run.info.run_id for run in runs(store)}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ExportError, match=r"No space left on device.*export again"):
        patch.setattr("mlflow.MlflowClient.log_artifact", full)
        export_to_mlflow(results, str(store))
    assert before < {run.info.run_id for run in runs(store)}
    export_to_mlflow(results, str(store))
    assert len(runs(store)) == 3
    assert not before & {run.info.run_id for run in runs(store)}


def test_the_command_says_what_was_written_and_leaves_the_environment_as_it_was(
    results: Results, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    before = dict(os.environ)
    result = export_by_command(results, store)
    assert result.exit_code == 0 and result.output.count("\n") == 1
    assert "MLflow experiment 'test'" in result.output
    assert dict(os.environ) == before and set(SETTINGS) - set(before)


SECRETS = ("secret", "abcdefgh123456", "pw@")
WITH_CREDENTIALS = (
    *("http://me:secret@host:5000", "https://me@host"),
    *("http://host/?token=abcdefgh123456", "postgresql://u:pw@db/x"),
)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        *((target, "MLFLOW_TRACKING_PASSWORD") for target in WITH_CREDENTIALS),
        *((target, "--mlflow: ") for target in ("htp://host", "sqlite:///x.db", "localhost:5000", "")),
        ("FILE/store", "NotADirectoryError|FileExistsError"),
        ("http://127.0.0.1:PORT", "Connection refused"),
    ],
)
def test_a_target_that_is_none_or_cannot_be_used_is_one_error(
    results: Results, tmp_path: Path, target: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    target = target.replace("PORT", str(free_port())).replace("FILE", str(tmp_path / "file"))
    result = export_by_command(results, target)
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert re.search(words, result.output)
    assert not any(secret in result.output for secret in SECRETS)


def test_two_targets_are_one_error_and_without_the_extra_it_says_what_to_install(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = export_by_command(results, "folder", "--markdown")
    assert result.exit_code == 2 and "give one of both; allowed: --markdown, --mlflow URI" in result.output
    monkeypatch.setitem(sys.modules, "mlflow", None)
    result = export_by_command(results, "folder")
    assert result.exit_code == 2 and "pip install 'mlflow-skinny>=3.17'" in result.output


def test_a_folder_without_a_run_or_a_measurement_is_one_error(
    tmp_path: Path, store: Path, make_experiment: Make
) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--mlflow", str(store)])
    assert result.exit_code == 2 and "not a run folder" in result.output and not store.exists()
    run = make_run(tmp_path, make_experiment({"per_device_batch_size": 8}), lambda cell, block: None)
    result = export_by_command(load(run), store)
    assert result.exit_code == 2 and "nothing to export" in result.output


def test_a_path_is_a_folder_and_a_name_of_databricks_is_none(tmp_path: Path) -> None:
    assert tracking_uri(str(tmp_path)) == tmp_path.as_uri()
    assert tracking_uri("databricks") == "databricks"


# -- what it consists of ----------------------------------------------------------------------------------------------


Runs = tuple[MlflowRun, list[MlflowRun]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, make_experiment: Make) -> Runs:
    """Two settings over three blocks; trainings with two seeds, of which the second misses the target."""
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8, "ddp.bucket_cap_mb": [1, 25]}
    convergence: dict[str, Any] = {"epochs": 1, "seeds": [0, 1], "target": TARGET}
    experiment = make_experiment(grid, throughput={"blocks": 3}, convergence=convergence)
    rates, accuracies = {"single": 100.0, "ddp": 150.0}, (0.9, 0.7)
    place = tmp_path_factory.mktemp("export")
    run = make_run(place, experiment, lambda cell, block: rates[cell.strategy] + block, accuracy=accuracies.__getitem__)
    return mlflow_runs(load(run))


def cell(exported: Runs, text: str) -> MlflowRun:
    (found,) = [run for run in exported[1] if text in run.name]
    return found


def values(run: MlflowRun) -> dict[str, float]:
    return {name: value for name, value, _ in run.metrics}


def test_a_cell_has_its_axes_and_options_as_parameters_and_speeds_with_their_intervals(exported: Runs) -> None:
    run = cell(exported, "bucket_cap_mb=25")
    expected = {"strategy": "ddp", "devices": "2", "per_device_batch_size": "8", "ddp.bucket_cap_mb": "25"}
    assert expected.items() <= run.params.items()
    assert run.params["compile"] == "false" and "device_ids" not in run.params
    found = values(run)
    for name in ("throughput", "speedup", "efficiency"):
        value = found[{"throughput": "throughput_per_s"}.get(name, name)]
        assert found[f"{name}_low"] < value < found[f"{name}_high"]
    assert found["throughput_per_s"] == pytest.approx(151, abs=0.01) and found["speedup"] == pytest.approx(1.495, 0.01)
    assert found["efficiency"] == pytest.approx(found["speedup"] / 2)


def test_cells_have_their_curves_by_epoch_and_seed_and_what_the_verdict_says(exported: Runs) -> None:
    run = cell(exported, "single")
    for metric in ("val_accuracy", "reported_f1"):
        curve = [(value, step) for name, value, step in run.metrics if name == f"{metric}/seed_1"]
        assert curve == [(0.7, 1)]
    found = values(run)
    assert found["time_to_target_s/seed_0"] == 2.0 and "time_to_target_s/seed_1" not in found
    tags = [run.tags for run in exported[1]]
    assert all(one["harness.label"] == run.name for one, run in zip(tags, exported[1], strict=True))
    verdicts = [one.get("harness.verdict") for one in tags]
    assert verdicts.count("what to use") == 1
    assert verdicts.count("cannot be told apart from what to use") == 1


def test_the_whole_has_the_verdict_as_its_description(exported: Runs) -> None:
    whole, _ = exported
    assert "**USE**" in whole.tags["mlflow.note.content"]
    assert "ddp x2" in whole.tags["harness.verdict"] and whole.tags["harness.trust"] in ("low", "medium")
    assert values(whole)["trials_ok"] > 0


@pytest.mark.slow
def test_cells_of_an_export_have_metrics_names_of_their_own_and_tags_that_mlflow_accepts() -> None:
    whole, cells = mlflow_runs(load(EXAMPLE))
    assert cells and all(run.metrics for run in cells)
    assert len({run.name for run in cells}) == len(cells)
    assert all(len(text) <= LONGEST_TAG for run in (whole, *cells) for text in run.tags.values())
