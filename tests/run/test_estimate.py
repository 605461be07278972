"""The preview of a run and its grade, through the pipeline, with a launcher that measures nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.results import load
from harness.config.experiment import load_experiment
from harness.record.estimate import read_estimate
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.run import pipeline
from harness.run.dry_run import show_plan
from harness.run.events import Event, Note, Previewed, Reported
from harness.run.request import Request
from tests.scripted import TEXT, Scripted

pytestmark = [pytest.mark.usefixtures("no_figures"), pytest.mark.slow]  # several whole runs a test

Run = Callable[..., list[Event]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the scripted experiment, or show its plan; return the events."""
    (file := tmp_path / "e.yaml").write_text(TEXT % 2)
    monkeypatch.setattr(pipeline, "start_ray", lambda *_: nullcontext())
    monkeypatch.setattr(pipeline, "launcher_for", lambda *_: Scripted(0.0, lambda count: None))
    monkeypatch.setattr("harness.report.html.FIGURES", {})

    def start(act: Callable[..., int] = pipeline.run, **options: Any) -> list[Event]:
        events: list[Event] = []
        request = Request(file, output=tmp_path / "results", **options)
        act(request, load_experiment(file), events.append)
        return events

    return start


def only(kind: type[Event], events: list[Event]) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def test_a_run_records_its_estimate_and_is_graded_by_it(run: Run) -> None:
    first, second = run(), run()
    total, source = only(Previewed, first).lines
    assert total.startswith("Takes at least ") and source.startswith("No earlier run")
    total, source = only(Previewed, second).lines
    before, after = (only(Reported, events) for events in (first, second))
    assert total.startswith("Takes about ") and f"Estimated from {before.folder} of " in source
    estimate = read_estimate(RunFolder(after.folder))
    assert estimate and estimate["earlier"] == str(before.folder)
    rows = {row["label"]: row for row in records(after.tables["preview"])}
    # every trial of the launcher says that it took 1 s
    assert (rows["ddp x2 · batch 8/device"]["estimated_s"], rows["ddp x2 · batch 8/device"]["actual_s"]) == (2.0, 2.0)
    assert rows["ddp x2 · batch 8/device"]["error"] == 0
    assert rows["report"]["actual_s"] > 0 and rows["total"]["actual_s"] > rows["report"]["actual_s"]
    again = {row["label"]: row for row in records(load(after.folder).preview)}
    assert again["total"]["actual_s"] == pytest.approx(rows["total"]["actual_s"])
    assert "Estimated and actual time" in after.report.read_text()


def test_the_estimate_of_a_resumed_run_is_of_what_is_left_and_its_record_stays(run: Run, tmp_path: Path) -> None:
    folder = only(Reported, run()).folder
    recorded = read_estimate(RunFolder(folder))
    resumed = run(show_plan, dry_run=True, resume=folder, add_blocks=1)
    table = only(Previewed, resumed).table
    trials = {line.cells[0]: line.cells[1] for line in table.rows}
    assert trials["ddp x2 · batch 8/device"] == "1" and trials["total"] == "6"
    run(resume=folder, add_blocks=1)
    assert read_estimate(RunFolder(folder)) == recorded
    shutil.copytree(folder, elsewhere := tmp_path / "elsewhere")
    shown = run(show_plan, dry_run=True, like=elsewhere)  # the named run counts even if there is a newer one
    assert any(f"Estimated from {elsewhere} of " in line for line in only(Previewed, shown).lines)
    (folder / "estimate.json").unlink()  # as of a run that began with an earlier version
    run(resume=folder, add_blocks=1)
    assert read_estimate(RunFolder(folder)) is None


def test_device_hours_end_a_run_with_a_report_and_a_higher_limit_goes_on(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    text = file.read_text()
    file.write_text(f"{text}limits: {{device_hours: 0.000001}}\n")
    events = run()
    reported = only(Reported, events)
    assert {line["skip_code"] for line in RunFolder(reported.folder).lines() if line["group_id"]} == {"time_up"}
    assert any(
        "limits.device_hours ends the run" in line for line in only(Previewed, run(show_plan, dry_run=True)).lines
    )
    assert any(isinstance(event, Reported) for event in run(resume=Path("auto")))
    file.write_text(f"{text}limits: {{device_hours: 1}}\n")
    resumed = run(resume=Path("auto"))
    note = next(event.text for event in resumed if isinstance(event, Note))
    assert note.endswith("limits.device_hours left out 12 trials")
    assert [line["outcome"] for line in RunFolder(reported.folder).lines()].count("ok") == 12
