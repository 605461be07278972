"""A saved model is evaluated as its training evaluated it; what must not be evaluated is bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.analysis.results import load
from harness.cli.commands import app
from harness.errors import RunFolderError, WorkloadError
from harness.launch.inline import InlineLauncher
from harness.plan.cell import Cell
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.run.evaluation import evaluate
from harness.run.execution import Execution
from harness.train import checkpoint
from harness.train.checkpoint import State, trained_facts
from tests.conftest import Make, laptop

OWN = "tests.equivalence:Regression"


def trained(make: Make, folder: Path, workload: str, **grid: Any) -> tuple[list[Path], list[dict[str, float]]]:
    """Checkpoints of trainings on one device and by dp, and their last epochs' metrics."""
    experiment = make(
        {"strategy": ["single", "dp"], "devices": [1, 2], "global_batch_size": 8, **grid},
        exclude=[{"strategy": "dp", "devices": 1}, {"strategy": "single", "devices": 2}],
        workload=workload,
        optimizer={"name": "SGD", "lr": 0.01},
        throughput=None,
        convergence={"epochs": 2, "seeds": 3, "only": {"devices": [1, 2]}},
        checkpoint={"every": 1, "folder": str(folder / "kept")},
    )
    plan = make_plan(experiment, laptop())
    run = RunFolder.create(folder, experiment, plan, "x")
    Execution(plan, run, InlineLauncher(experiment), lambda event: None).run()
    epochs = load(run.path).epochs
    last = epochs[epochs["epoch"] == 2].set_index("trial_id")
    names = [name for name in last.columns if str(name).startswith("val_") and last[name].notna().any()]
    return [folder / "kept" / trial for trial in last.index], [last.loc[trial, names].to_dict() for trial in last.index]


@pytest.mark.slow
def test_a_built_in_workload_has_the_metrics_of_its_last_epoch(make_experiment: Make, tmp_path: Path) -> None:
    places, metrics = trained(make_experiment, tmp_path, "mlp", model="small")
    assert len(places) == 2
    for place, wanted in zip(places, metrics, strict=True):
        assert evaluate(place, no_user_code=True) == pytest.approx(wanted, rel=1e-5)
    assert evaluate(places[0] / "epoch-2") == pytest.approx(metrics[0], rel=1e-5)
    assert evaluate(places[0] / "epoch-1") != pytest.approx(metrics[0], rel=1e-5)
    shown = CliRunner().invoke(app, ["evaluate", str(places[0])])
    assert shown.exit_code == 0 and f"val_accuracy {metrics[0]['val_accuracy']:.6g}" in shown.output


@pytest.mark.slow
def test_code_of_ones_own_needs_the_file_that_names_it_unchanged(make_experiment: Make, tmp_path: Path) -> None:
    (place, *_), (wanted, *_) = trained(make_experiment, tmp_path, OWN)
    file = tmp_path / "own.yaml"
    file.write_text(f"name: x\nworkload: {OWN}\ngrid: {{global_batch_size: 8}}\n")
    assert evaluate(place, file) == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(WorkloadError, match="give the experiment file that names it, FILE"):
        evaluate(place)
    with pytest.raises(WorkloadError, match="--no-user-code: the checkpoint is of the workload tests"):
        evaluate(place, file, no_user_code=True)
    other = tmp_path / "other.yaml"
    other.write_text("name: x\nworkload: mlp\ngrid: {global_batch_size: 8}\n")
    with pytest.raises(WorkloadError, match="names the workload mlp; the checkpoint is of tests"):
        evaluate(place, other)
    values = json.loads((place / "epoch-2" / "state.json").read_text())
    values["trained"]["code"] = dict.fromkeys(values["trained"]["code"], "0" * 64)
    (place / "epoch-2" / "state.json").write_text(json.dumps(values))
    with pytest.raises(WorkloadError, match="is not the code that the checkpoint was trained with"):
        evaluate(place, file)
    del values["trained"]
    (place / "epoch-2" / "state.json").write_text(json.dumps(values))
    with pytest.raises(RunFolderError, match="does not name its workload"):
        evaluate(place, file)


def test_a_model_that_does_not_fit_on_one_device_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    place = tmp_path / "epoch-1"
    cell = Cell("mlp", "digits", "small", "ddp", "cpu", 8, 1, "strong", 8, 64)
    checkpoint.write(tmp_path, 1, State({}, {}, {}, {}), {"trained": trained_facts(cell, 0)})
    monkeypatch.setattr("harness.run.evaluation.Training", full)
    with pytest.raises(WorkloadError, match="does not fit into the memory of one device with a batch of 8; evaluate"):
        evaluate(place)


def test_a_checkpoint_that_cannot_be_used_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").mkdir()
    place = checkpoint.write(tmp_path, 1, State({}, {}, {}, {}), {"trained": {"workload": "mlp"}})
    for text in ("[]", '{"trained": []}', '{"trained": {"workload": "mlp"}}'):
        (place / "state.json").write_text(text)
        shown = CliRunner().invoke(app, ["evaluate", str(place)])
        assert shown.exit_code == 2 and shown.output.startswith("error: "), shown.output

    with pytest.raises(RunFolderError, match="no complete checkpoint; give RUN_FOLDER/checkpoints/TRIAL/epoch-N"):
        evaluate(tmp_path / "none")
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "epoch-3")])
    assert shown.exit_code == 2 and "Traceback" not in shown.output

    def denied(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(RunFolderError, match="cannot be read: Permission denied"):
        evaluate(tmp_path)
