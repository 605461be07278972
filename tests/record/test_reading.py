"""Untrusted run folders: they load, or raise one error that names the file; no content is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import harness
from harness.cli.common import BAD_INPUT, exit_code_of
from harness.errors import HarnessError
from harness.record.folder import RunFolder
from harness.record.lines import SCHEMA
from harness.record.schema import RECORDED
from harness.report.figures.steps import step_times
from harness.report.html import write_report

pytestmark = pytest.mark.usefixtures("no_figures")

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"
TABLES = [*(table.name for table in RECORDED), "scaling", "convergence", "environment", "experiment"]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a copy of the example run."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run"))


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
WRITTEN = ["plan.json", "environment.json", "experiment.resolved.yaml", "experiment.yaml"]
FILES = [*WRITTEN, "trials.jsonl", "steps.parquet"]
DAMAGED = "is damaged or incomplete"
SHAPES = ("", "[]", "3", "null", '"x"', "{", "[" * 100_000, '{"a": ' * 100_000, "9" * 5000)
ENVIRONMENTS = ('{"invocations": 3}', '{"groups": [1]}', '{"groups": {"a": 1}}', '{"invocations": [[]]}')
ENDS = (b"<html>", b"\x80\x81\x82", b'{"name": 3', b"PAR1")
LINES = ("[1]\n", "3\n", "null\n", "{}\n", "trial\n", "\n\n<html>\n", "a,b\n1,2\n")


@pytest.mark.parametrize(
    ("name", "kept", "content", "problem"),
    [
        *((name, 0, TRASH, name) for name in (*FILES, "epochs.parquet")),
        *((name, 0, text.encode(), name) for name in ("plan.json", "environment.json") for text in SHAPES),
        *(("environment.json", 0, text.encode(), f"environment.json: {DAMAGED}") for text in ENVIRONMENTS),
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


@pytest.mark.parametrize("content", [{"groups": [{}]}, {"groups": [{"nodes": [{}]}]}, {"groups": [{"nodes": 3}]}])
def test_an_environment_with_empty_nodes_costs_the_report_with_one_line(
    recorded: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "environment.json").write_text(json.dumps(content))
    report = (recorded / "report.html").read_text()
    assert exit_code_of(lambda: bool(write_report(recorded))) == BAD_INPUT
    (output,) = capsys.readouterr().err.splitlines()
    assert output.startswith(f"error: {recorded / 'environment.json'}: {DAMAGED}")
    assert (recorded / "report.html").read_text() == report


WRONG_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a trial id that leads elsewhere": lambda line: line.update(trial_id="../../etc/passwd"),
    "a trial id that is none": lambda line: line.update(trial_id=None),
    "an attempt that is a text": lambda line: line.update(attempt="../1"),
    "an attempt that is a flag": lambda line: line.update(attempt=True),
    "a huge number": lambda line: line.update(block=10**30),
    "a reason that is a mapping": lambda line: line.update(reason={"a": 1}),
    "windows that are none": lambda line: line.update(windows=3),
    "windows of numbers": lambda line: line.update(windows=[1, 2]),
    "a window without its time": lambda line: line["windows"][0].pop("duration_s"),
    "a window of texts": lambda line: line["windows"][0].update(weight="many"),
    "ranks that are none": lambda line: line.pop("ranks"),
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
    whole = path.read_bytes()
    *before, last = whole.rstrip(b"\n").split(b"\n")
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


def test_a_pickle_inside_parquet_and_an_object_in_yaml_are_not_loaded(
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
