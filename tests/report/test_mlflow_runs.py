"""What an export to MLflow consists of: parameters, metrics and tags of the run and of its cells."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.results import load
from harness.config.experiment import Experiment
from harness.report.mlflow_export import LONGEST_TAG, MlflowExport, MlflowRun, mlflow_export
from tests.run_folders import make_run

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"
TARGET = {"metric": "val_accuracy", "at_least": 0.8}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, make_experiment: Callable[..., Experiment]) -> MlflowExport:
    """Two settings over three blocks; trainings with two seeds, of which the second misses the target."""
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8, "ddp.bucket_cap_mb": [1, 25]}
    convergence: dict[str, Any] = {"epochs": 1, "seeds": [0, 1], "target": TARGET}
    experiment = make_experiment(grid, throughput={"blocks": 3}, convergence=convergence)
    rates = {"single": 100.0, "ddp": 150.0}
    run = make_run(
        tmp_path_factory.mktemp("export"),
        experiment,
        lambda cell, block: rates[cell.strategy] + block,
        accuracy=lambda seed: 0.9 if seed == 0 else 0.7,
    )
    (run / "tables" / "cells.csv").write_text("a")
    return mlflow_export(load(run))


def cell(export: MlflowExport, text: str) -> MlflowRun:
    (found,) = [run for run in export.cells if text in run.name]
    return found


def values(run: MlflowRun) -> dict[str, float]:
    return {metric.name: metric.value for metric in run.metrics}


def test_a_cell_has_its_axes_and_options_as_parameters_and_speeds_with_their_intervals(export: MlflowExport) -> None:
    run = cell(export, "bucket_cap_mb=25")
    expected = {"strategy": "ddp", "devices": "2", "per_device_batch_size": "8", "ddp.bucket_cap_mb": "25"}
    assert expected.items() <= run.params.items()
    assert run.params["compile"] == "false" and "device_ids" not in run.params
    found = values(run)
    for name in ("throughput", "speedup", "efficiency"):
        value = found[{"throughput": "throughput_per_s"}.get(name, name)]
        assert found[f"{name}_low"] < value < found[f"{name}_high"]
    assert found["throughput_per_s"] == pytest.approx(151, abs=0.01) and found["speedup"] == pytest.approx(1.495, 0.01)
    assert found["efficiency"] == pytest.approx(found["speedup"] / 2)


def test_cells_have_their_curves_by_epoch_and_seed_and_what_the_verdict_says(export: MlflowExport) -> None:
    run = cell(export, "single")
    curve = [(one.value, one.step) for one in run.metrics if one.name == "val_accuracy/seed_1"]
    assert curve == [(0.7, 1)]
    found = values(run)
    assert found["time_to_target_s/seed_0"] == 2.0 and "time_to_target_s/seed_1" not in found
    tags = [run.tags for run in export.cells]
    assert all(one["harness.label"] == run.name for one, run in zip(tags, export.cells, strict=True))
    verdicts = [one.get("harness.verdict") for one in tags]
    assert verdicts.count("what to use") == 1
    assert verdicts.count("cannot be told apart from what to use") == 1


def test_the_whole_has_the_verdict_as_its_description_and_the_files_that_are_there(export: MlflowExport) -> None:
    whole = export.whole
    assert "**What to use**" in whole.tags["mlflow.note.content"]
    assert "ddp x2" in whole.tags["harness.verdict"] and whole.tags["harness.trust"] in ("low", "medium")
    assert values(whole)["trials_ok"] > 0
    assert (export.start_ms, export.end_ms) == (1_700_000_000_000, 1_700_000_009_000)
    assert [path.name for path in export.files[""]] == ["experiment.yaml"]
    assert [path.name for path in export.files["tables"]] == ["cells.csv"]


def test_the_digest_of_an_export_follows_the_content_and_the_identity_the_run(
    tmp_path: Path, export: MlflowExport
) -> None:
    folder = export.files[""][0].parent
    assert mlflow_export(load(folder)).digest == export.digest
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    (moved / "tables" / "cells.csv").write_text("b")
    changed = mlflow_export(load(moved))
    assert changed.identity == export.identity and changed.digest != export.digest
    found = mlflow_export(load(EXAMPLE))
    assert found.cells and all(run.metrics for run in found.cells)
    assert len({run.name for run in found.cells}) == len(found.cells)
    assert all(len(text) <= LONGEST_TAG for run in (found.whole, *found.cells) for text in run.tags.values())
