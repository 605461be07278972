"""``harness.run_experiment``, the preview and its grade, and ``doctor --links``: whole runs, with nothing measured."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import harness
from harness.analysis.results import load
from harness.config.load import load_experiment
from harness.errors import ClusterError, ExperimentError, RunFolderError
from harness.launch.protocol import GroupStarted, Message, TrialStarted
from harness.plan.diagnostics import seconds_of_links
from harness.plan.inventory import Inventory
from harness.plan.trial import TrialResult, WorkerGroup
from harness.record.estimate import read_estimate
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.report import html
from harness.report.notebook import RunResults
from harness.run import api, pipeline, prepare
from harness.run.console import ConsoleSink
from harness.run.doctor import run_links
from harness.run.dry_run import show_plan
from harness.run.events import Event, Note, Previewed, Reported
from harness.run.request import SUBMIT_VARIABLE, Request, read_experiment
from tests.conftest import gpu_cluster, laptop
from tests.records import link_row, rank_row
from tests.scripted import TEXT, Scripted

pytestmark = pytest.mark.usefixtures("no_figures")

CONTENT: dict[str, Any] = yaml.safe_load(TEXT % 1)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A launcher without Ray, in a folder of its own; the list gets a number for each trial that it is given."""
    given: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "start_ray", lambda *_: ExitStack())
    monkeypatch.setattr(pipeline, "launcher_for", lambda *_: Scripted(0.0, given.append))
    return given


def test_the_package_has_the_functions_of_all_and_no_others() -> None:
    assert all(callable(getattr(harness, name)) for name in harness.__all__) and {*harness.__all__} <= {*dir(harness)}
    assert harness.run_experiment is api.run_experiment
    with pytest.raises(AttributeError, match="'harness' has no attribute 'runs'"):
        harness.runs  # noqa: B018


def test_a_dict_is_run_and_its_results_are_returned(
    scripted: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = harness.run_experiment(CONTENT, output=tmp_path / "out", quiet=True)
    assert isinstance(results, RunResults)
    assert set(results.trials["outcome"]) == {"ok"} and len(results.scaling) == 6
    assert results.impossible == {"single runs on at most one device": 2}
    assert results.folder.path.parent == tmp_path / "out" / "scripted" and results.folder.report.exists()
    assert yaml.safe_load(results.folder.source_text()) == CONTENT
    assert "source" not in results.environment["invocations"][0]
    assert "Plan of" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_is_run_and_resumed_and_only_narrows_it(scripted: list[int], tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(TEXT % 1)
    first = harness.run_experiment("e.yaml", only={"devices": 1})
    assert set(first.trials["devices"]) == {1}
    measured = len(scripted)
    again = harness.run_experiment(tmp_path / "e.yaml", resume=first.folder.path)
    assert again.folder.path == first.folder.path and set(again.trials["devices"]) == {1, 2}
    assert measured < len(scripted)
    assert again.environment["invocations"][0]["source"]["file"] == str(tmp_path / "e.yaml")
    assert harness.run_experiment("e.yaml", resume="auto").folder.path != first.folder.path


@pytest.mark.slow
def test_an_interruption_is_raised_once_the_report_is_written(
    scripted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(count: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "launcher_for", lambda *_: Scripted(0.0, interrupt))
    with pytest.raises(KeyboardInterrupt):
        harness.run_experiment(CONTENT, output="out")
    (folder,) = (tmp_path / "out" / "scripted").iterdir()
    assert (folder / "report.html").exists()
    assert f"Resume with: harness.run_experiment(..., resume='out/scripted/{folder.name}')" in capsys.readouterr().out
    monkeypatch.setattr(pipeline, "launcher_for", lambda *_: Scripted(0.0, scripted.append))
    results = harness.run_experiment(CONTENT, resume=folder)
    assert results.folder.path == folder and results.missing.empty


def test_mistakes_and_what_this_machine_cannot_measure_are_one_error(scripted: list[int], tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        harness.run_experiment({"name": "x", "grid": {"devices": 0, "batch_size": 8}})
    assert caught.value.source == "experiment (a dict)" and len(caught.value.problems) == 2
    with pytest.raises(ExperimentError, match="no such file"):
        harness.run_experiment("nowhere.yaml")
    with pytest.raises(ExperimentError, match=r"cannot represent an object.*; allowed: mappings"):
        harness.run_experiment({**CONTENT, "workload_options": {"width": object()}})
    with pytest.raises(ExperimentError, match=r"^harness.run_experiment: 3 problems"):
        harness.run_experiment(None, only=[1], output=1)  # type: ignore[arg-type]
    for resume in (None, "auto"):
        with pytest.raises(RunFolderError, match="the run folder cannot be created: embedded null byte"):
            harness.run_experiment(CONTENT, output="a\0b", resume=resume, quiet=True)
    with pytest.raises(ClusterError, match=r"no cell can run on 1 node, .*: too few devices: .* \(\d cells\)"):
        harness.run_experiment({**CONTENT, "device": "cuda"}, quiet=True)
    grid = {"strategy": "ddp", "devices": 2, "global_batch_size": 3}
    with pytest.raises(ClusterError, match="global batch 3 does not divide by 2 devices"):
        harness.run_experiment({**CONTENT, "grid": grid}, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"experiment": 5}, "experiment: got 5, int; allowed: the path of an experiment file, or its content as a di"),
        ({"only": "devices=8"}, "only: got 'devices=8', str; allowed: a dict of axes, such as {'strategy': 'ddp'"),
        ({"only": [1]}, "only: got [1], list; allowed: a dict"),
        ({"only": {"stratgy": "ddp"}}, "unknown axis 'stratgy'"),
        ({"only": {1: 2}}, "unknown axis '1'"),
        ({"only": {"devices": True}}, "no cell of scripted matches: devices: got true"),
        ({"only": {"devices": object()}}, "('cannot represent an object'"),
        ({"output": 5}, "output: got 5, int; allowed: the path of the folder of run folders, or the URI of a store"),
        ({"resume": True}, "resume: got True, bool; allowed: the path of a run folder, the URI of a run, or 'auto'"),
        ({"address": 6379}, "address: got 6379, int; allowed: HOST:PORT"),
        ({"preflight": "no"}, "preflight: got 'no', str; allowed: True or False"),
    ],
)
def test_a_wrong_argument_is_one_error(
    scripted: list[int], tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        harness.run_experiment(**{"experiment": CONTENT, **arguments})
    (only,) = caught.value.problems
    assert only.startswith(problem) and not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_taken_as_numbers(scripted: list[int], tmp_path: Path) -> None:
    grid = {**CONTENT["grid"], "devices": np.array([1, 2])}
    content = {**CONTENT, "seed": np.int64(1), "grid": grid}
    results = harness.run_experiment(content, only={"devices": np.int64(1)}, output=tmp_path / "out", quiet=True)
    assert results.experiment.seed == 1 and set(results.trials["devices"]) == {1}


Run = Callable[..., list[Event]]


@pytest.fixture
def run(scripted: list[int], tmp_path: Path) -> Run:
    """Run the scripted experiment, or show its plan; return the events."""
    (file := tmp_path / "e.yaml").write_text(TEXT % 2)

    def start(act: Callable[..., int] = pipeline.run, **options: Any) -> list[Event]:
        events: list[Event] = []
        request = Request(file, output=tmp_path / "results", **options)
        act(request, load_experiment(file), events.append)
        return events

    return start


def only(kind: type[Event], events: list[Event]) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


@pytest.mark.slow
def test_a_run_records_its_estimate_and_is_graded_by_it(run: Run) -> None:
    first, second = run(), run()
    total, source = only(Previewed, first).lines
    assert total.startswith("Takes at least ") and source.startswith("No earlier run")
    total, source = only(Previewed, second).lines
    before, after = (only(Reported, events) for events in (first, second))
    assert total.startswith("Takes about ") and f"Estimated from {before.folder} of " in source
    estimate = read_estimate(RunFolder(after.folder))
    assert estimate and estimate.earlier == str(before.folder)
    rows = {row["label"]: row for row in records(after.tables["preview"])}
    # every trial of the launcher says that it took 1 s
    assert (rows["ddp x2 · batch 8/device"]["estimated_s"], rows["ddp x2 · batch 8/device"]["actual_s"]) == (2.0, 2.0)
    assert rows["ddp x2 · batch 8/device"]["error"] == 0
    until_s = rows["until the report"]["actual_s"]
    assert until_s > 0 and rows["total"]["actual_s"] is None  # the report's own time is known once it is written
    again = {row["label"]: row for row in records(load(after.folder).preview)}
    report_s = again["report"]["actual_s"]
    assert report_s > 0 and again["total"]["actual_s"] == pytest.approx(until_s + report_s)
    assert "Estimated and actual time" in after.report.read_text()


@pytest.mark.slow
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


@pytest.mark.slow
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


Command = Callable[..., tuple[int, Path, str]]
LINKED = """
name: linked
grid: {strategy: [single, ddp, fsdp], devices: [1, 2, 8], per_device_batch_size: 8}
exclude: [{strategy: fsdp, devices: 2}]
convergence: {epochs: 1, target: {metric: val_accuracy, at_least: 0.5}}
checkpoint: {every: 1}
throughput: {explain: false}
"""


class Measured:
    """Every placement has the same links; or every trial fails."""

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        yield GroupStarted((), ())
        devices = range(group.placement.devices)
        rows = [
            link_row("send_receive", source=source, target=target, size_bytes=size, time_s=seconds, link="NV12")
            for source in devices
            for target in range(source + 1, len(devices))
            for size, seconds in ((1024, 1.2345e-5), (2**30, 2.5e-3))
        ]
        for trial in group.trials:
            yield TrialStarted(trial.id)
            if self.outcome == "error":
                yield TrialResult(trial.id, "error", "RuntimeError on rank 0: broken")
                return
            found = tuple([*rows, link_row("all_reduce", time_s=2e-5)])
            ranks = tuple(rank_row(rank) for rank in devices)
            yield TrialResult(trial.id, "ok", links=found, steps_s=1.0, trial_s=1.0, ranks=ranks)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command on an inventory; return the exit code, the run folder and the output in 80 columns."""
    monkeypatch.setattr(html, "FIGURES", {})
    monkeypatch.setattr(pipeline, "start_ray", lambda *given: nullcontext())

    def run_it(
        inventory: Inventory, outcome: str = "ok", text: str = LINKED, quiet: bool = True
    ) -> tuple[int, Path, str]:
        monkeypatch.setattr(prepare.cluster, "local_inventory", lambda: inventory)
        monkeypatch.setattr(pipeline, "launcher_for", lambda *given: Measured(outcome))
        (file := tmp_path / "linked.yaml").write_text(text)
        request = Request(file=file, output=tmp_path / "out")
        shown = io.StringIO()
        with ConsoleSink(Console(file=shown, width=80), quiet=quiet) as sink:
            code = run_links(request, read_experiment(request), sink)
        return code, next((tmp_path / "out" / "linked").iterdir()), shown.getvalue()

    return run_it


def test_a_run_in_a_batch_job_records_the_command_that_submits_it_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("", "sbatch s.sbatch"):
        monkeypatch.setenv(SUBMIT_VARIABLE, words)
        _, folder, _ = command(gpu_cluster())
        submit = harness.load(folder).environment["invocations"][-1].get("submit")
        assert submit == (f"{words} {folder.parents[2]}/linked.yaml --links --resume {folder}" if words else None)
        shutil.rmtree(folder.parents[1])


def test_each_placement_is_measured_for_a_minute_and_nothing_else_is(command: Command) -> None:
    code, folder, shown = command(gpu_cluster(), quiet=False)
    results = harness.load(folder)
    assert code == 0
    assert results.trials["purpose"].tolist() == ["links", "links"]
    assert sorted(results.trials["devices"]) == [2, 8]
    settings = results.experiment.throughput
    assert settings and seconds_of_links(settings, "cuda") == 60.0
    written = (folder / "tables" / "links.csv").read_text().splitlines()
    assert len(written) == 1 + 2 * (1 + 28) and (folder / "tables" / "collectives.csv").is_file()
    assert "Links and collectives" in shown and "send and receive" in shown and "NV12" in shown
    matrix = shown[shown.index("Links between devices") : shown.index("Trials: ")]
    assert max(map(len, matrix.splitlines())) <= 80
    assert matrix.count("429") == 2 + 56  # GB/s, in both directions
    for devices in (2, 8):  # short labels, and nothing is said of cells
        assert f" ddp x{devices} · block 0 · links  measured in 1.0 s\n" in shown
    assert "Asked: " not in shown and "Together: 2 trials" in shown and "NEXT" in shown
    assert "Numbers in brackets" not in shown and "Numbers in brackets" not in (folder / "report.html").read_text()


def test_a_placement_that_cannot_be_measured_fails_and_a_file_without_one_is_refused(command: Command) -> None:
    code, folder, _ = command(laptop(), "error")
    assert code == 1
    assert harness.load(folder).trials["outcome"].tolist() == ["error"]
    with pytest.raises(ExperimentError, match=r"no cell of .*linked.yaml that can run here has links; allowed: ddp"):
        command(laptop(), text="name: linked\ngrid: {per_device_batch_size: 8}\n")
