"""The pipeline's own decisions: exit codes, what may be resumed or downloaded, and what is checked before."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from harness.analysis.results import TABLES, Results
from harness.errors import RunFolderError, WorkloadError
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.report.html import IncompleteReport
from harness.run import pipeline
from harness.run.events import Event, Note, Reported, RunStarted
from harness.run.prepare import check_optimizers, check_paths, check_target, data_paths, download_data
from harness.run.request import Request
from harness.system.process import INTERRUPTED
from tests.conftest import Make, laptop
from tests.run.test_execution import ScriptedLauncher

FACTS = {"attempt": 1, "invocation": 0, "group_id": "g", "position": 0}


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    return make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop())


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["ok", "ok", "ok"], 0),
        (["ok", "skipped", "ok"], 0),
        (["lost ok", "ok", "ok"], 0),
        (["skipped", "skipped", "skipped"], 1),
        *((["ok", outcome, "ok"], 1) for outcome in ("error", "oom", "diverged", "timeout", "lost", "")),
    ],
)
def test_exit_codes(plan: Plan, tmp_path: Path, outcomes: list[str], code: int) -> None:
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    for trial, attempts in zip(plan.trials, outcomes, strict=True):
        for attempt, outcome in enumerate(attempts.split(), start=1):
            folder.append(trial, TrialResult(trial.id, outcome), {**FACTS, "attempt": attempt})
    assert pipeline._exit_code(folder, plan) == code


def test_a_profile_without_result_is_no_failure(make_experiment: Make, tmp_path: Path) -> None:
    grid = {"strategy": ["single", "dp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1, "explain": True}), laptop())
    assert "profile" in {trial.purpose for trial in plan.trials}
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    for trial in plan.trials:
        folder.append(trial, TrialResult(trial.id, "error" if trial.purpose == "profile" else "ok"), FACTS)
    assert pipeline._exit_code(folder, plan) == 0


@pytest.mark.parametrize("code", [pipeline.OK, INTERRUPTED])
def test_a_report_without_a_part_is_shown_and_then_an_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def broken(results: Results) -> Any:
        raise KeyError("no such column")

    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    folder.append(plan.trials[0], TrialResult(plan.trials[0].id, "lost"), FACTS)
    monkeypatch.setattr("harness.report.html.FIGURES", {})
    monkeypatch.setitem(TABLES, "scaling", broken)  # type: ignore[arg-type]
    events: list[Event] = []
    with pytest.raises(IncompleteReport, match="the table scaling, ") if code != INTERRUPTED else nullcontext():
        assert pipeline._report(folder, 0.0, events.append, code) == code
    (reported,) = (event for event in events if isinstance(event, Reported))
    assert reported.tables["scaling"].empty and len(reported.tables["trials"]) == 1
    assert folder.report.exists()
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("the table scaling, " in note for note in notes) == (code == INTERRUPTED)


def test_an_interruption_of_the_report_leaves_the_run_unfinished(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    folder.set_invocation(0, {"started_at": 1.0, "ended": "finished"})
    events: list[Event] = []
    monkeypatch.setattr(pipeline, "start_ray", lambda *_: nullcontext())
    for name, returned in (("launcher_for", None), ("_measure", None), ("_report", INTERRUPTED)):
        monkeypatch.setattr(pipeline, name, lambda *_, returned=returned: returned)
    request = Request(tmp_path / "e.yaml")
    assert pipeline._measure_and_report(plan, folder, request, None, 0.0, events.append) == INTERRUPTED
    assert folder.environment()["invocations"] == [{"started_at": 1.0, "ended": "interrupted"}]
    (note,) = events
    assert isinstance(note, Note) and note.text.startswith("Resume with: ") and str(folder.path) in note.text


def test_differences_from_the_last_invocation_are_printed_before_measuring(
    make_experiment: Make, tmp_path: Path
) -> None:
    (home := tmp_path / "home" / "package").mkdir(parents=True)
    (home / "own.py").write_text("WIDTH = 8\n")
    own = make_plan(make_experiment({"per_device_batch_size": 8}, workload="package.own:Own"), laptop())
    folder = RunFolder.create(tmp_path, own.experiment, own, "x")
    (request := Request(home.parent / "e.yaml")).file.write_text("name: x")

    def result() -> list[Event]:
        events: list[Event] = []
        launcher = ScriptedLauncher(lambda trial, tries: "error")
        pipeline._measure(own, folder, launcher, request, 0.0, events.append)
        return events

    assert not [event for event in result() if isinstance(event, Note)]
    assert not [event for event in result() if isinstance(event, Note)]
    (home / "own.py").write_text("WIDTH = 16\n")
    note, started, *_ = result()
    said = "Changed since the last invocation: "
    assert isinstance(note, Note) and note.text.startswith(f"{said}the workload's code ")
    assert isinstance(started, RunStarted)
    assert folder.environment()["invocations"][2]["differs"] == [note.text.removeprefix(said)]
    sources = [invocation["source"] for invocation in folder.environment()["invocations"]]
    assert {source["file"] for source in sources} == {str(request.file)}
    assert [source["modules"]["package.own"]["file"] for source in sources] == [str(home / "own.py")] * 3
    assert len({source["modules"]["package.own"]["sha256"] for source in sources}) == 2
    request.file.unlink()
    result()
    assert "source" not in folder.environment()["invocations"][3]


@pytest.mark.parametrize(
    ("workload", "data", "options", "read"),
    [
        ("image_classification", "cifar10", {}, ["/x/cifar-10-batches-py"]),
        ("image_classification", "cifar10", {"download": True}, []),
        ("image_classification", "synthetic", {}, []),
        ("image_classification", "/y", {}, ["/y"]),
        ("own:Own", "synthetic", {}, ["/x"]),
    ],
)
def test_the_folder_of_cifar10_is_required_for_cifar10_that_is_not_downloaded_alone(
    make_experiment: Make, workload: str, data: str, options: dict[str, Any], read: list[str]
) -> None:
    grid = {"data": data, "model": "resnet8", "per_device_batch_size": 8}
    experiment = make_experiment(grid, workload=workload, workload_options={"data_folder": "/x", **options})
    assert data_paths([trial.cell for trial in make_plan(experiment, laptop()).trials]) == read


def test_a_download_without_a_network_names_file_and_place(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: Any, **options: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    grid = {"data": "cifar10", "model": "resnet8", "per_device_batch_size": 8}
    options = {"data_folder": str(tmp_path), "download": True}
    with pytest.raises(WorkloadError, match=r"no route to host.*Unpack cifar-10-python.tar.gz"):
        download_data(make_plan(make_experiment(grid, workload_options=options), laptop()))


@pytest.mark.parametrize(
    ("members", "metric", "problem"),
    [
        ({}, "val_f1", "got 'val_f1'; allowed: train_loss, val_loss"),
        ({"metrics": min}, "val_f1", None),
        ({"derived": min}, "val_f1", None),
        ({"derived": min}, "f1", "got 'f1'; allowed: train_loss, val_loss, or val_<name> of your own metrics"),
        ({"metrics": min, "metric_names": ("f1",)}, "val_f1", None),
        ({"metrics": min, "metric_names": ("f1",)}, "val_f2", "got 'val_f2'; did you mean 'val_f1'?"),
    ],
)
def test_a_target_must_be_a_metric_of_the_workload(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], metric: str, problem: str | None
) -> None:
    monkeypatch.setattr("harness.train.workloads.load_class", lambda name: type("Own", (), members))
    target = {"metric": metric, "at_least": 0.5}
    experiment = make_experiment(workload="own:Own", convergence={"epochs": 1, "target": target})
    if problem is None:
        check_target(experiment)
    else:
        with pytest.raises(WorkloadError) as caught:
            check_target(experiment)
        assert str(caught.value).startswith(f"convergence.target.metric: {problem}")


class TwoNodes:
    """A cluster whose nodes lack paths."""

    def __init__(self, missing: dict[str, list[str]]) -> None:
        self.missing = missing

    def missing_paths(self, paths: list[str], used: list[bool] | None = None) -> dict[str, list[str]]:
        return self.missing


def test_missing_data_names_every_node_and_path(plan: Plan) -> None:
    nodes: Any = TwoNodes({"a (10.0.0.1)": ["/x", "/y"], "b (10.0.0.2)": ["/x"]})
    with pytest.raises(WorkloadError) as caught:
        check_paths(plan, nodes)
    assert str(caught.value).startswith("files are missing: /x, /y on a (10.0.0.1); /x on b (10.0.0.2).")
    assert "cifar" not in str(caught.value)


def test_checkpoints_are_in_the_run_folder_or_in_one_of_the_runs_own(make_experiment: Make, tmp_path: Path) -> None:
    far: Any = TwoNodes({"far (10.0.0.2)": ["/x"]})
    (file := tmp_path / "file").write_text("x")

    def keeping(cluster: Any = None, **checkpoint: Any) -> tuple[RunFolder, str]:
        given = make_experiment(convergence={"epochs": 2, "seeds": 0}, checkpoint=checkpoint)
        plan = make_plan(given, laptop())
        folder = RunFolder.create(tmp_path / "out", given, plan, "x")
        settings = pipeline._keeping_checkpoints(plan, folder, cluster).experiment.checkpoint
        assert settings and settings.folder
        return folder, settings.folder

    folder, kept = keeping()
    assert kept == str(folder.path / "checkpoints")
    folder, kept = keeping(folder=str(tmp_path / "shared"))
    assert kept == str(tmp_path / "shared" / folder.path.name) and Path(kept).is_dir()
    with pytest.raises(RunFolderError, match=r"checkpoint.folder: .* cannot be made: Not a directory; give another"):
        keeping(folder=str(file))
    with pytest.raises(RunFolderError, match=r"is not there on far \(10.0.0.2\); give a folder that all nodes see"):
        keeping(far)


def test_optimizers_of_a_grid_share_their_options_and_the_error_says_so(make_experiment: Make) -> None:
    def check(**optimizer: object) -> None:
        axes = {"per_device_batch_size": 8, "optimizer.name": ["SGD", "Adam"]}
        check_optimizers(make_plan(make_experiment(axes, optimizer=optimizer), laptop()))

    check(lr=0.01)
    with pytest.raises(
        WorkloadError, match=r"optimizer\.momentum: Adam has no such option.*for each of Adam, SGD.*cells"
    ):
        check(lr=0.01, momentum=0.9)
    plain = make_experiment({"per_device_batch_size": 8}, optimizer={"name": "Adam", "momentum": 0.9})
    with pytest.raises(WorkloadError) as caught:
        check_optimizers(make_plan(plain, laptop()))
    assert "cells" not in str(caught.value)
