"""The run folder and its estimate: complete files, append-only lines, readable after a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.errors import RunFolderError, WriteError
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult
from harness.record.estimate import Estimate, read_estimate, write_estimate
from harness.record.folder import RunFolder
from harness.record.schema import RAW
from tests.conftest import Make, laptop
from tests.system.test_files import LIMIT, small_files

FACTS = {"attempt": 1, "invocation": 0, "group_id": "b0-g0", "position": 0}


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    experiment = make_experiment(
        {"strategy": ["single", "ddp"], "devices": [1, 4], "per_device_batch_size": 8},
        throughput={"blocks": 2},
        convergence={"epochs": 1, "seeds": 0},
    )
    return make_plan(experiment, laptop())


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, plan.experiment, plan, "name: test\n")


def test_a_new_folder_holds_the_experiment_and_the_plan_and_has_one_writer(folder: RunFolder, plan: Plan) -> None:
    assert folder.source_text() == "name: test\n"
    assert folder.experiment() == plan.experiment
    assert [group["id"] for group in folder.plan()["groups"]] == [group.id for group in plan.groups]
    assert len(folder.plan()["skipped"]) == len(plan.skips)
    assert folder.lines() == []
    folder.set_invocation(0, {"started_at": 1.0})
    folder.add_environment({"group_id": "b0-g0", "nodes": []})
    folder.set_invocation(0, {"wall_s": 2.0})
    folder.set_invocation(1, {"started_at": 3.0})
    content = folder.environment()
    assert content["invocations"] == [{"started_at": 1.0, "wall_s": 2.0}, {"started_at": 3.0}]
    assert [group["group_id"] for group in content["groups"]] == ["b0-g0"]
    with folder.locked(), pytest.raises(RunFolderError, match="another run is"), RunFolder(folder.path).locked():
        pass
    with folder.locked():
        pass


STEPS: Any = {"rank": [0, 0], "window": [1, 1], "step": [0, 1], "warmup": [False] * 2, "loss": [1.0] * 2}
STEPS |= {"step_s": [0.5] * 2, "wait_s": [0.1] * 2}


def test_a_recorded_trial_reads_back_with_every_axis_and_without_a_pickle(folder: RunFolder, plan: Plan) -> None:
    trial = plan.trials[0]
    row = folder.append(trial, TrialResult(trial.id, "ok", steps=STEPS, trial_s=1.5), FACTS)
    (line,) = lines = folder.lines()
    assert (line["trial_id"], line["outcome"], line["trial_s"], line["attempt"]) == (trial.id, "ok", 1.5, 1)
    for axis in ("strategy", "devices", "nodes", "model", "data", "per_device_batch_size", "precision"):
        assert row[axis] == getattr(trial.cell, axis)
    assert row["options"]["optimizer.lr"] == 0.1
    written = (folder.path / "trials.jsonl").read_text()
    assert json.loads(json.loads(written)["options"]) == row["options"] == line["options"]
    before = folder.steps(lines)
    assert before["trial_id"].tolist() == [trial.id] * 2 and before["step_s"].tolist() == [0.5, 0.5]
    kinds = {path.suffix for path in folder.path.rglob("*") if path.is_file()}
    assert kinds <= {".yaml", ".json", ".jsonl", ".parquet", ".txt", ".html", ".csv", ".png", ".svg", ""}
    folder.compact({table.name: getattr(folder, table.name)(lines) for table in RAW})
    for raw in (folder.path / "raw").iterdir():
        raw.unlink()
    assert folder.steps(lines).equals(before), "a folder without raw files reads the compacted ones"


def test_a_traceback_goes_into_a_log_that_the_line_names(folder: RunFolder, plan: Plan) -> None:
    """Python decodes a file name that is not UTF-8 to lone surrogates; untrusted JSON may hold them too."""
    first, second = plan.trials[:2]
    output = "cannot open \udcff.txt"
    line = folder.append(first, TrialResult(first.id, "error", output, detail=output), FACTS)
    assert line["log"] == f"logs/{first.id}-1.txt"
    assert (folder.path / line["log"]).read_text() == "cannot open \\udcff.txt"
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write(json.dumps({**line, "trial_id": second.id, "reason": output}) + "\n")
    for row in folder.lines():
        row["reason"].encode()
    harness.load(folder.path).trials.to_csv()


def test_a_line_cut_short_does_not_count_and_does_not_harm_the_next(folder: RunFolder, plan: Plan) -> None:
    one, two = plan.trials[:2]
    folder.append(one, TrialResult(one.id, "ok"), FACTS)
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write('{"trial_id": "half')
    assert [row["trial_id"] for row in folder.lines()] == [one.id]
    folder.append(two, TrialResult(two.id, "ok"), FACTS)
    assert [row["trial_id"] for row in folder.lines()] == [one.id, two.id]


def test_a_trial_that_cannot_be_written_loses_none_before_it(folder: RunFolder, plan: Plan) -> None:
    one, two = plan.trials[:2]
    folder.append(one, TrialResult(one.id, "ok", steps=STEPS), FACTS)
    failed = TrialResult(two.id, "error", "boom", detail="x" * (LIMIT + 1))
    with small_files(), pytest.raises(WriteError, match=rf"{two.id}-1.txt: cannot be written: File too large"):
        folder.append(two, failed, FACTS)
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.append(two, TrialResult(two.id, "ok", facts={"steady": object()}), FACTS)
    assert [line["trial_id"] for line in folder.lines()] == [one.id]
    assert len(folder.steps(folder.lines())) == 2 and not list(folder.path.rglob("*.partial"))


def test_steps_without_a_written_line_do_not_count_for_the_next_attempt(
    folder: RunFolder, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, lines: Sequence[str]) -> None:
        raise WriteError("trials.jsonl: cannot be written")

    trial = plan.trials[0]
    monkeypatch.setattr("harness.record.folder.append_lines", full)
    with pytest.raises(WriteError):
        folder.append(trial, TrialResult(trial.id, "ok", steps=STEPS), FACTS)
    assert not list((folder.path / "raw").iterdir()), "on a full disk they take the space that other files need"
    monkeypatch.undo()
    folder.append(trial, TrialResult(trial.id, "skipped", "the time is up"), FACTS)
    assert folder.steps(folder.lines()).empty


def test_steps_of_a_killed_run_without_a_line_do_not_count_for_the_next_attempt(folder: RunFolder, plan: Plan) -> None:
    done, killed = plan.trials[:2]
    folder.append(done, TrialResult(done.id, "ok", steps=STEPS), FACTS)
    lines = (folder.path / "trials.jsonl").read_bytes()
    folder.append(killed, TrialResult(killed.id, "ok", steps=STEPS), FACTS)
    (folder.path / "trials.jsonl").write_bytes(lines)  # killed after its steps and before its line
    (folder.path / "raw" / "x.parquet.partial").touch()
    with folder.locked():
        assert len(list((folder.path / "raw").iterdir())) == 2, "only partial files are removed"
        assert folder.steps(folder.lines())["trial_id"].unique().tolist() == [done.id]
        folder.append(killed, TrialResult(killed.id, "skipped", "the time is up"), FACTS)
    assert folder.steps(folder.lines())["trial_id"].unique().tolist() == [done.id]


def test_a_training_has_its_epochs_and_its_steps_in_files_of_their_own(make_experiment: Make, tmp_path: Path) -> None:
    experiment = make_experiment({"per_device_batch_size": 4}, throughput=None, convergence={"epochs": 1, "seeds": 0})
    plan = make_plan(experiment, laptop())
    folder, (trial, *_) = RunFolder.create(tmp_path, experiment, plan, ""), plan.trials
    rows = {"epoch": [1, 1], "step": [1, 2], "loss": [2.0, math.nan], "learning_rate": [0.1, 0.1]}
    folder.append(trial, TrialResult(trial.id, "ok", epochs={"epoch": [1]}, training_steps=rows), FACTS)
    before = folder.training_steps(folder.lines())
    assert before["trial_id"].tolist() == [trial.id] * 2 and before["step"].tolist() == [1, 2]
    assert math.isnan(before["loss"].to_numpy(float, na_value=-1)[1]), "a loss that is no number keeps its value"
    assert folder.epochs(folder.lines())["epoch"].tolist() == [1]
    assert sorted(path.name for path in (folder.path / "raw").iterdir()) == [
        f"{trial.id}-1-steps.parquet",
        f"{trial.id}-1.parquet",
    ]
    folder.append(trial, TrialResult(trial.id, "error", "again"), FACTS)  # as a killed attempt would leave its files
    assert not list((folder.path / "raw").iterdir())


def test_a_place_that_is_no_run_folder_or_cannot_be_one_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be created: .*; give another folder with --output"):
        RunFolder.create(tmp_path / "file" / "results", plan.experiment, plan, "")
    for name in ("elsewhere", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "results" / "test").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="is a link, which may lead outside the output folder"):
        RunFolder.create(tmp_path / "results", plan.experiment, plan, "")
    assert not list((tmp_path / "elsewhere").iterdir())


SECRET = "hunter2-hunter2"
GITHUB, URL = "ghp_" + "a1B2" * 9, "https://me:hunter2-hunter2@host/data"


def test_no_secret_reaches_any_file(make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATABASE_PASSWORD", SECRET)
    options = {"hub_token": SECRET, "address": URL, "other": GITHUB, "width": 8}
    grid = {"strategy": ["single", "ddp"], "devices": [1, 4], "per_device_batch_size": 8, "model": GITHUB}
    experiment = make_experiment(grid, workload="own:Own", workload_options=options)  # fmt: skip
    plan = make_plan(experiment, laptop())
    source = f"name: test  # {GITHUB}\nworkload_options: {{hub_token: {SECRET}, address: '{URL}', other: {GITHUB}}}\n"
    folder = RunFolder.create(tmp_path, experiment, plan, source)
    output = f"ValueError: cannot open {URL} with {GITHUB}, Bearer {SECRET}"
    for trial in plan.trials[:2]:
        more: Any = {"error_type": "ValueError", "detail": f"Traceback\n{output}", "facts": {"x": output}}
        folder.append(trial, TrialResult(trial.id, "error", output, **more), FACTS)
    for skip in plan.skips:
        folder.append(skip.trial, TrialResult(skip.trial.id, "skipped", skip.reason), FACTS)
    folder.set_invocation(0, {"command": ["run", "x.yaml", "--address", URL, f"--password={SECRET}"]})
    folder.add_environment({"group_id": "g", "nodes": [{"variables": {"NCCL_X": URL}, "token": SECRET}], "ranks": []})
    for path in folder.path.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert SECRET not in text and GITHUB not in text, path.name
            assert path.suffix not in (".txt", ".jsonl") or "<redacted>" in text, path.name
    assert folder.experiment().workload_options["width"] == 8
    assert len(folder.lines()) == 2 + len(plan.skips)


FIRST: Estimate = {"earlier": None, "devices": 2, "at_once": 1, "bound": "at least", "parts": []}


@pytest.fixture
def estimated(make_experiment: Make, tmp_path: Path) -> RunFolder:
    plan = make_plan(make_experiment(), laptop())
    return RunFolder.create(tmp_path, plan.experiment, plan, "x")


def test_an_estimate_is_read_as_it_was_written(estimated: RunFolder) -> None:
    assert read_estimate(estimated) is None
    write_estimate(estimated, FIRST)
    assert read_estimate(estimated) == FIRST


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected a JSON object"),
        ("{}", "Field required"),
        (json.dumps({**FIRST, "devices": "many"}), "devices"),
        (json.dumps({**FIRST, "parts": [{"part": "cell"}]}), r"parts\.0"),
    ],
)
def test_a_damaged_estimate_is_an_error_with_its_name(estimated: RunFolder, text: str, problem: str) -> None:
    (estimated.path / "estimate.json").write_text(text)
    with pytest.raises(RunFolderError, match=rf"estimate\.json.*{problem}"):
        read_estimate(estimated)
