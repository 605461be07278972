"""The run folder: complete files, append-only lines, readable after a crash; an untrusted one is never executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import harness
from harness.cli.arguments import BAD_INPUT, exit_code_of
from harness.errors import HarnessError, RunFolderError, WriteError
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult
from harness.record.estimate import Estimate, PartTime, read_estimate, write_estimate
from harness.record.folder import RunFolder
from harness.record.lines import SCHEMA, with_counts
from harness.record.schema import RAW, RECORDED
from harness.report.figures.steps import step_times
from harness.report.html import write_report
from tests.conftest import EXAMPLE, Make, laptop
from tests.system.test_files import LIMIT, small_files

pytestmark = pytest.mark.usefixtures("no_figures")


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
    path = folder.path / "environment.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"invocation":1,"fac')  # by a killed run
    assert folder.environment() == content
    folder.set_invocation(1, {"wall_s": 4.0})
    assert path.read_bytes().startswith(whole) and len(path.read_bytes().splitlines()) == 5
    assert folder.environment()["invocations"][1] == {"started_at": 3.0, "wall_s": 4.0}
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
    before = folder.rows("steps", lines)
    assert before["trial_id"].tolist() == [trial.id] * 2 and before["step_s"].tolist() == [0.5, 0.5]
    kinds = {path.suffix for path in folder.path.rglob("*") if path.is_file()}
    assert kinds <= {".yaml", ".json", ".jsonl", ".parquet", ".txt", ".html", ".csv", ".png", ".svg", ""}
    folder.compact({table.name: folder.rows(table.name, lines) for table in RAW}, lines)
    for raw in (folder.path / "raw").iterdir():
        raw.unlink()
    assert folder.rows("steps", lines).equals(before), "a folder without raw files reads the compacted ones"


def test_a_traceback_goes_into_a_log_that_the_line_names(folder: RunFolder, plan: Plan) -> None:
    """Python decodes a file name that is not UTF-8 to lone surrogates; untrusted JSON may hold them too."""
    first, second = plan.trials[:2]
    output = "cannot open \udcff.txt"
    line = folder.append(first, TrialResult(first.id, "error", output, detail=output), FACTS)
    assert line["log"] == f"logs/{first.id}-1.txt"
    assert (folder.path / line["log"]).read_text() == "cannot open \\udcff.txt"
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write(json.dumps({**with_counts(line), "trial_id": second.id, "reason": output}) + "\n")
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
    assert len(folder.rows("steps", folder.lines())) == 2 and not list(folder.path.rglob("*.partial"))


def test_steps_without_a_written_line_do_not_count_for_the_next_attempt(
    folder: RunFolder, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, lines: Sequence[str]) -> None:
        raise WriteError("trials.jsonl: cannot be written")

    trial = plan.trials[0]
    monkeypatch.setattr("harness.record.folder.files.append_lines", full)
    with pytest.raises(WriteError):
        folder.append(trial, TrialResult(trial.id, "ok", steps=STEPS), FACTS)
    assert not list((folder.path / "raw").iterdir()), "on a full disk they take the space that other files need"
    monkeypatch.undo()
    folder.append(trial, TrialResult(trial.id, "skipped", "the time is up"), FACTS)
    assert folder.rows("steps", folder.lines()).empty


def test_steps_of_a_killed_run_without_a_line_do_not_count_for_the_next_attempt(folder: RunFolder, plan: Plan) -> None:
    done, killed = plan.trials[:2]
    folder.append(done, TrialResult(done.id, "ok", steps=STEPS), FACTS)
    lines = (folder.path / "trials.jsonl").read_bytes()
    folder.append(killed, TrialResult(killed.id, "ok", steps=STEPS), FACTS)
    (folder.path / "trials.jsonl").write_bytes(lines)  # killed after its steps and before its line
    (folder.path / "raw" / "x.parquet.partial").touch()
    with folder.locked():
        assert len(list((folder.path / "raw").iterdir())) == 2, "only partial files are removed"
        assert folder.rows("steps", folder.lines())["trial_id"].unique().tolist() == [done.id]
        folder.append(killed, TrialResult(killed.id, "skipped", "the time is up"), FACTS)
    assert folder.rows("steps", folder.lines())["trial_id"].unique().tolist() == [done.id]


def test_a_training_has_its_epochs_and_its_steps_in_files_of_their_own(make_experiment: Make, tmp_path: Path) -> None:
    experiment = make_experiment({"per_device_batch_size": 4}, throughput=None, convergence={"epochs": 1, "seeds": 0})
    plan = make_plan(experiment, laptop())
    folder, (trial, *_) = RunFolder.create(tmp_path, experiment, plan, ""), plan.trials
    rows = {"epoch": [1, 1], "step": [1, 2], "loss": [2.0, math.nan], "learning_rate": [0.1, 0.1]}
    folder.append(trial, TrialResult(trial.id, "ok", epochs={"epoch": [1]}, training_steps=rows), FACTS)
    before = folder.rows("training_steps", folder.lines())
    assert before["trial_id"].tolist() == [trial.id] * 2 and before["step"].tolist() == [1, 2]
    assert math.isnan(before["loss"].to_numpy(float, na_value=-1)[1]), "a loss that is no number keeps its value"
    assert folder.rows("epochs", folder.lines())["epoch"].tolist() == [1]
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
    for trial, skip in plan.skips.items():
        folder.append(trial, TrialResult(trial.id, "skipped", skip.text), FACTS)
    folder.set_invocation(0, {"command": ["run", "x.yaml", "--address", URL, f"--password={SECRET}"]})
    folder.add_environment({"group_id": "g", "nodes": [{"variables": {"NCCL_X": URL}, "token": SECRET}], "ranks": []})
    for path in folder.path.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert SECRET not in text and GITHUB not in text, path.name
            assert path.suffix not in (".txt", ".jsonl") or "<redacted>" in text, path.name
    assert folder.experiment().workload_options["width"] == 8
    assert len(folder.lines()) == 2 + len(plan.skips)


FIRST = Estimate(None, 2, 1, "at least", [PartTime("cell", "a", "single x1", 2, 3.0, 3.0, None, "lower bound")])


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
        (json.dumps({**asdict(FIRST), "devices": "many"}), "devices"),
        (json.dumps({**asdict(FIRST), "parts": [{"part": "cell"}]}), r"parts\.0"),
    ],
)
def test_a_damaged_estimate_is_an_error_with_its_name(estimated: RunFolder, text: str, problem: str) -> None:
    (estimated.path / "estimate.json").write_text(text)
    with pytest.raises(RunFolderError, match=rf"estimate\.json.*{problem}"):
        read_estimate(estimated)


TABLES = [*(table.name for table in RECORDED), "scaling", "convergence", "environment", "experiment"]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a copy of the example run."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run", ignore=shutil.ignore_patterns("figures", "tables")))


def problem_of(folder: Path) -> str:
    """Return the message of the error that reading a whole folder raises."""
    with pytest.raises(HarnessError) as caught:
        results = harness.load(folder)
        for name in TABLES:
            getattr(results, name)
        results.folder.source_text()
    return str(caught.value)


def first_line(folder: Path) -> dict[str, Any]:
    lines = (json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines())
    return next(line for line in lines if line["windows"])


@pytest.mark.parametrize(
    ("content", "got", "reader"),
    [
        ({"schema": SCHEMA + 1}, SCHEMA + 1, "another version"),
        ({"schema_version": 3}, 3, "0.1"),
        ({"schema": None}, None, "another version"),
        ({"schema": [1]}, [1], "another version"),
    ],
)
def test_a_folder_of_another_schema_is_refused_with_the_version_that_reads_it(
    recorded: Path, content: dict[str, Any], got: object, reader: str
) -> None:
    (recorded / "plan.json").write_text(json.dumps(content))
    assert problem_of(recorded) == (
        f"{recorded / 'plan.json'}: got schema {got}; this harness reads and resumes schema {SCHEMA}. "
        f"Read the folder with harness {reader}, which made it, or measure again"
    )


TRASH = b"\x00\xff\x80trash\n\x93\n" * 40
WRITTEN = ["plan.json", "environment.jsonl", "experiment.resolved.yaml", "experiment.yaml"]
FILES = [*WRITTEN, "trials.jsonl", "steps.parquet", "by_rank.jsonl"]
DAMAGED = "is damaged or incomplete"
SHAPES = ("", "[]", "3", "null", '"x"', "{", "[" * 100_000, '{"a": ' * 100_000, "9" * 5000)
WHOLE = [shape for shape in SHAPES if shape not in ("", "{")]
"""Not the beginning of an entry, which a killed run may leave."""
ENTRIES = (
    *("{}", '{"group": 1}', '{"invocation": 0}', '{"invocation": -1, "facts": {}}', '{"invocation": 0, "facts": []}'),
    *("3", "[]", "null", '"x"', "{"),
)
ENDS = (b"<html>", b"\x80\x81\x82", b'{"name": 3', b"PAR1")
LINES = ("[1]\n", "3\n", "null\n", "{}\n", "trial\n", "\n\n<html>\n", "a,b\n1,2\n")


@pytest.mark.parametrize(
    ("name", "kept", "content", "problem"),
    [
        *((name, 0, TRASH, name) for name in (*FILES, "epochs.parquet")),
        *(("plan.json", 0, text.encode(), "plan.json") for text in SHAPES),
        *(("environment.jsonl", 0, text.encode(), f"environment.jsonl: line 1 {DAMAGED}") for text in WHOLE),
        *(("environment.jsonl", 0, f"{text}\n".encode(), f"environment.jsonl: line 1 {DAMAGED}") for text in ENTRIES),
        *(("trials.jsonl", 0, text.encode(), "trials.jsonl: line") for text in LINES),
        *(("trials.jsonl", None, end, f"trials.jsonl: {DAMAGED}") for end in ENDS),
        *(("steps.parquet", cut, b"", f"steps.parquet: {DAMAGED}") for cut in (0, 4, 100, -1, -8)),
    ],
)
def test_a_damaged_file_is_one_error_with_its_name(
    recorded: Path, name: str, kept: int | None, content: bytes, problem: str
) -> None:
    path = recorded / name
    before = path.read_bytes()[:kept] if path.exists() else b""
    path.write_bytes(before + content)
    assert problem in problem_of(recorded)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file(recorded: Path, name: str) -> None:
    (recorded / name).unlink()
    (recorded / name).mkdir()
    output = problem_of(recorded)
    assert name in output or "not a run folder" in output


@pytest.mark.parametrize("content", [{}, {"nodes": [{}]}, {"nodes": 3}])
def test_an_environment_with_empty_nodes_costs_the_report_with_one_line(
    recorded: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "environment.jsonl").write_text(json.dumps({"group": content}) + "\n")
    report = (recorded / "report.html").read_text()
    assert exit_code_of(lambda: bool(write_report(recorded))) == BAD_INPUT
    (output,) = capsys.readouterr().err.splitlines()
    assert output.startswith(f"error: {recorded / 'environment.jsonl'}: {DAMAGED}")
    assert (recorded / "report.html").read_text() == report


WRONG_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a trial id that leads elsewhere": lambda line: line.update(trial_id="../../etc/passwd"),
    "a trial id that is none": lambda line: line.update(trial_id=None),
    "an attempt that is a text": lambda line: line.update(attempt="../1"),
    "an attempt that is a flag": lambda line: line.update(attempt=True),
    "a huge number": lambda line: line.update(block=10**30),
    "a reason that is a mapping": lambda line: line.update(reason={"a": 1}),
    "facts that are a list": lambda line: line.update(purpose="", facts=[]),
    "no outcome": lambda line: line.pop("outcome"),
    "no cell": lambda line: line.pop("cell_id"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_line_with_a_wrong_value(recorded: Path, name: str) -> None:
    line = first_line(recorded)
    WRONG_VALUES[name](line)
    (recorded / "trials.jsonl").write_text(json.dumps(line) + "\n")
    assert "trials.jsonl: line 1 is damaged or incomplete" in problem_of(recorded)


def test_a_line_that_is_cut_anywhere_does_not_count(recorded: Path) -> None:
    """Both the last line, and a line that a later invocation ended with a newline."""
    path = recorded / "trials.jsonl"
    *before, last = path.read_bytes().rstrip(b"\n").split(b"\n")[-3:]
    kept = b"\n".join(before) + b"\n"
    for cut in [*range(1, 40), len(last) // 2, len(last) - 1]:
        for ending in (b"", b"\0" * 100, b"\n" + last + b"\n"):
            path.write_bytes(kept + last[:cut] + ending)
            expected = len(before) + ending.endswith(b"\n")
            assert len(RunFolder(recorded).lines()) == expected, (cut, ending[:10])


WRONG_TABLES: dict[str, dict[str, Any]] = {
    "other columns": {"x": [1], "y": ["a"]},
    "no column": {},
    "texts for numbers": {"trial_id": ["a"], "attempt": [1], "rank": ["one"], "step_s": [1.0], "warmup": [False]},
    "lists": {"trial_id": ["a"], "attempt": [1], "rank": [[1, 2]]},
    "bytes in a column of their own": {"trial_id": ["a"], "attempt": [1], "rank": [1], "payload": [pickle.dumps(3)]},
    "mappings": {"trial_id": ["a"], "attempt": [1], "rank": [1], "extra": [{"a": 1}]},
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_parquet_of_another_table(recorded: Path, name: str) -> None:
    pq.write_table(pa.table(WRONG_TABLES[name]), recorded / "steps.parquet")
    assert "steps.parquet: is damaged or incomplete" in problem_of(recorded)


def test_the_file_of_one_trial_is_named(recorded: Path) -> None:
    trial = first_line(recorded)["trial_id"]
    (recorded / "raw").mkdir()
    (recorded / "raw" / f"{trial}-1.parquet").write_bytes(TRASH)
    assert f"raw/{trial}-1.parquet: is damaged or incomplete" in problem_of(recorded)


class Payload:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def with_payload(path: Path, payload: bytes) -> None:
    """Rewrite a valid table of steps with a pickle in its extension types and code in its pandas metadata."""
    table = pq.read_table(path)
    notes = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    fields = [field.with_metadata(notes if field.name == "rank" else None) for field in table.schema]
    about = json.dumps({"index_columns": ["__import__('os').abort()"], "columns": [], "creator": {}})
    pq.write_table(table.cast(pa.schema(fields, metadata={b"pandas": about.encode()})), path)


def test_a_pickle_in_parquet_and_an_object_in_yaml_are_not_loaded(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.report.html.FIGURES", {"step_times": step_times})  # it is drawn from this file
    mark = tmp_path / "mark"
    with_payload(recorded / "steps.parquet", pickle.dumps(Payload(mark)))
    results = harness.load(recorded)
    assert results.steps["rank"].notna().all()
    write_report(recorded)
    (recorded / "experiment.resolved.yaml").write_text(f"name: !!python/object/apply:os.mkdir ['{mark}']\n")
    assert "experiment.resolved.yaml" in problem_of(recorded)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))  # the effect that loading would have had
    assert mark.exists()
