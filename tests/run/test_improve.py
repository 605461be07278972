"""``--improve``: what is tried, what goes on, and what is said of it; the runs are made by hand."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import harness
from harness.analysis.improvements import CONFIRMATION, SCREENING, STEPS
from harness.analysis.results import Results
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.errors import ClusterError, ExperimentError
from harness.plan.cell import Cell
from harness.record.folder import RunFolder
from harness.report.candidates import candidates, combined
from harness.report.html import write_report
from harness.report.sentence import Context
from harness.report.verdict import make_verdict
from harness.run import improve
from harness.run.events import Emit, Event, Note, Reported
from harness.run.request import Request, mistakes, read_experiment, resume_command, with_improvement
from harness.run.resume import same_experiment
from harness.system.process import INTERRUPTED
from tests.run_folders import make_run

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [64], "model": ["resnet8"]}
WASTEFUL: dict[str, Any] = {
    "name": "wasteful",
    "grid": GRID,
    "training": {"accumulation": 4},
    "strategy_options": {"ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True}},
    "throughput": {"blocks": 5, "explain": False},
    "equivalence": False,
    "improve": "5m",
}
NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01, 0.99)


def experiment(**changes: Any) -> Experiment:
    return parse_experiment({**WASTEFUL, **changes}, source="test")


def rate(cell: Cell, block: int) -> float | None:
    """The planted speeds: accumulation costs half, find_unused_parameters a tenth; nothing else matters."""
    speed = 1000.0 * (0.9 * cell.devices if cell.devices > 1 else 1.0) * NOISE[(block + cell.devices) % 8]
    speed *= 0.5 if cell.axis("training.accumulation") == 4 else 1.0
    return speed * (0.9 if cell.axis("ddp.find_unused_parameters") else 1.0)


class Runs:
    """Stands for ``pipeline.run``: each run is made at once with the planted speeds. ``asked``: its experiments."""

    def __init__(self, place: Path, speeds: Any = rate) -> None:
        self.place, self.speeds, self.asked, self.bases = place, speeds, list[Experiment](), dict[str, bool]()

    def __call__(self, request: Request, asked: Experiment, emit: Emit) -> int:
        self.asked.append(asked)
        self.bases[asked.name] = request.bases
        if request.resume:
            RunFolder.open(request.resume).set_invocation(0, {"ended": "finished"})
            return 0
        main = not request.output.is_relative_to(self.place / asked.name) and asked.name not in STEPS
        path = make_run(self.place if main else request.output, asked, self.speeds)
        if main:
            verdict: Any = None  # which nothing here reads
            emit(Reported(path, path / "report.html", {}, verdict, 1.0))
        return 0


@pytest.fixture(scope="module", autouse=True)
def without_report() -> Iterator[None]:
    """Write none at the end of an improvement, of whose time it takes most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "write_report", harness.load)
        yield


Improved = tuple[Results, list[Experiment], list[Event]]


def improve_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: Any = rate, **changes: Any) -> Improved:
    """Run and improve; return the results, the experiments of all runs and the events. No time passes.

    Tables of a loaded machine take a while, and a step has as many blocks as there is time for.
    """
    runs, events = Runs(tmp_path, speeds), list[Event]()
    monkeypatch.setattr(improve, "time", SimpleNamespace(time=lambda: 1.7e9))
    monkeypatch.setattr(improve, "run", runs)
    assert improve.run_and_improve(Request(file=tmp_path / "x.yaml"), experiment(**changes), events.append) == 0
    assert not runs.bases.get(SCREENING), "it makes no claim, so that it needs none that the planner adds"
    folder = next(event.folder for event in events if isinstance(event, Reported))
    return harness.load(folder), runs.asked, events


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> Improved:
    """A run of which two options help, with its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.report.html.FIGURES", {})
        patch.setattr(improve, "write_report", write_report)
        return improve_in(tmp_path_factory.mktemp("helped"), patch)


@pytest.fixture
def improved(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Improved]:
    """Improve with these speeds and changes, in a folder of its own."""
    return lambda *speeds, **changes: improve_in(tmp_path_factory.mktemp("run"), monkeypatch, *speeds, **changes)


def test_what_helps_is_combined_and_confirmed_and_the_verdict_says_by_how_much(helped: Improved) -> None:
    results, asked, _ = helped
    assert [each.name for each in asked] == ["wasteful", *STEPS]
    table = results.improvements
    kept = table[table["kept"]]
    assert kept.groupby("step")["changes"].agg(list).to_dict() == {
        "screening": ["training.accumulation: 1", "ddp.find_unused_parameters: false"],
        "combination": ["ddp.find_unused_parameters: false, training.accumulation: 1"],
        "confirmation": ["ddp.find_unused_parameters: false, training.accumulation: 1"],
    }
    last = table[table["step"] == CONFIRMATION].iloc[0]
    assert last.blocks == 12 and last.ratio == pytest.approx(2 / 0.9) and last.low > 1
    verdict = make_verdict(results)
    (tried,) = verdict.lines["TRIED"]
    both = "ddp.find_unused_parameters: false, training.accumulation: 1"
    assert f"{both} is confirmed, clear: 2.22" in tried.text and "in 12 blocks of fresh processes" in tried.text
    best = parse_experiment(yaml.safe_load(verdict.next_file), source="next")
    assert best.grids[0].options == {"ddp.find_unused_parameters": False, "training.accumulation": 1}
    assert best.grids[0].devices == (2,) and best.improve is None
    assert "<td>screening</td>" in results.folder.report.read_text()


def test_each_step_times_the_cell_beside_others_in_the_time_that_is_left_and_measures_no_twin(helped: Improved) -> None:
    _, (_, screening, _, confirmation), _ = helped
    assert screening.throughput and confirmation.throughput
    assert (screening.throughput.blocks, confirmation.throughput.blocks) == (4, 12)
    assert not screening.throughput.traces and not confirmation.throughput.traces
    assert not screening.throughput.twin and not screening.throughput.explain and confirmation.throughput.explain
    assert screening.limits.wall and confirmation.limits.wall
    assert screening.limits.wall <= 0.35 * 300 < confirmation.limits.wall <= 300
    assert all(grid.strategy == ("ddp",) for grid in screening.cells)
    bases = [grid.options for grid in confirmation.cells if grid.strategy == ("single",)]
    assert bases == [{}, {"training.accumulation": 1}]  # of the waterfall before and after


@pytest.mark.parametrize(
    ("step", "group_s", "trial_s", "blocks"),
    [
        *((CONFIRMATION, 1.0, 0.1, 12), (CONFIRMATION, 30.0, 0.1, 8), (CONFIRMATION, 30.0, 5.0, 6)),
        *((CONFIRMATION, 100.0, 0.1, 6), (SCREENING, 1.0, 0.1, 6), (SCREENING, 20.0, 0.1, 4), (SCREENING, 1.0, 9.0, 2)),
    ],
)
def test_a_step_has_as_many_blocks_as_there_is_time_for(
    helped: Improved, monkeypatch: pytest.MonkeyPatch, step: str, group_s: float, trial_s: float, blocks: int
) -> None:
    """Of the worker groups of the steps before, and with explained trials, as the waterfall needs them."""
    results, (asked, *_), _ = helped
    assert asked.improve
    one = improve.Improvement(Request(Path("x.yaml")), asked, asked.improve, results, print)
    one._cell_id = "a"
    one._began = time.time() + 1  # all 300 s are left
    run = SimpleNamespace(environment={"groups": [{"whole_s": 0.5}, {"whole_s": group_s}]})
    monkeypatch.setattr(improve, "improving_runs", lambda path: [("a", SCREENING, run)])
    monkeypatch.setattr(improve.Improvement, "_trial_s", trial_s)
    assert one._blocks(step, [{"compile": True}]) == blocks


def test_no_gain_is_claimed_of_what_changes_nothing_or_only_in_the_screening(improved: Callable[..., Improved]) -> None:
    def alike(cell: Cell, block: int) -> float:
        return 1000.0 * NOISE[block % 8]

    results, asked, _ = improved(alike)
    assert [each.name for each in asked] == ["wasteful", "screening"]
    (tried,) = make_verdict(results).lines["TRIED"]
    assert tried.text.endswith("none helped.")

    def lucky(cell: Cell, block: int) -> float:
        changed = cell.axis("training.accumulation") == 1
        return 1000.0 * (1.1 if changed and block in (0, 1) else 0.95 if changed else 1.0) * NOISE[block % 8]

    results, asked, _ = improved(lucky)
    assert asked[-1].name == CONFIRMATION
    (tried,) = make_verdict(results).lines["TRIED"]
    assert "training.accumulation: 1 is not confirmed: 0.97" in tried.text


def test_a_setting_that_nothing_was_compared_with_is_said(improved: Callable[..., Improved]) -> None:
    seen = set[tuple[str, int]]()

    def once(cell: Cell, block: int) -> float | None:
        again = (cell.id, block) in seen
        seen.add((cell.id, block))
        return None if again and cell.strategy == "ddp" else rate(cell, block)

    _, asked, events = improved(once)
    assert [each.name for each in asked] == ["wasteful", "screening"]
    said = [event.text for event in events if isinstance(event, Note)]
    assert said[-1] == (
        "Nothing was compared with ddp on 2 devices · batch 64/device as it failed when it was measured again."
    )


@pytest.mark.slow
def test_a_confirmation_of_too_few_blocks_and_a_setting_that_fails_are_no_gain(
    improved: Callable[..., Improved],
) -> None:
    def fails(cell: Cell, block: int) -> float | None:
        return None if cell.axis("ddp.find_unused_parameters") is False else rate(cell, block)

    results, asked, _ = improved(fails)
    table = results.improvements
    failed = table[table["changes"] == "ddp.find_unused_parameters: false"].iloc[0]
    assert not failed.kept and failed.reason == "ValueError on rank 0: bad"
    assert asked[-1].name == CONFIRMATION and make_verdict(results).command.endswith("next.yaml")

    def short(cell: Cell, block: int) -> float | None:
        return None if block > 3 and cell.axis("training.accumulation") == 1 else rate(cell, block)

    results, *_ = improved(short)
    (tried,) = make_verdict(results).lines["TRIED"]
    assert (
        "training.accumulation: 1 is not confirmed: measured in 4 of 5 blocks, its other trials failed." in tried.text
    )
    cell = next((results.folder.path / "improve").glob("*"))
    RunFolder.open(next(cell.glob("confirmation/*"))).set_invocation(0, {"ended": "interrupted"})
    (tried,) = make_verdict(harness.load(results.folder.path)).lines["TRIED"]
    assert "helped; no confirmation of 5 blocks was measured." in tried.text
    RunFolder.open(next(cell.glob("screening/*"))).path.joinpath("trials.jsonl").unlink()  # no time was left for any
    (tried,) = make_verdict(harness.load(results.folder.path)).lines["TRIED"]
    assert tried.text.startswith("0 options tried")


def test_steps_that_are_measured_are_kept_and_an_interrupted_one_is_measured_again(
    helped: Improved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = harness.load(shutil.copytree(helped[0].folder.path, tmp_path / "run"))
    again, events = Runs(tmp_path), list[Event]()
    monkeypatch.setattr(improve, "run", again)
    settings = experiment().improve
    assert settings

    def run() -> int:
        found = harness.load(results.folder.path)
        return improve.Improvement(Request(tmp_path / "x.yaml"), experiment(), settings, found, events.append).run()

    assert run() == 0
    assert again.asked == [] and sum("already measured" in text for text in notes(events)) == 3
    confirmation = next((results.folder.path / "improve").glob("*/confirmation/*"))
    RunFolder.open(confirmation).set_invocation(0, {"ended": "interrupted"})
    before = harness.load(results.folder.path).improvements
    assert run() == 0
    assert [each.name for each in again.asked] == [CONFIRMATION]  # resumed: with the cells and windows that it had
    assert len([*results.folder.path.glob("improve/*/confirmation/*")]) == 1
    assert harness.load(results.folder.path).improvements["ratio"].equals(before["ratio"])


def test_an_interruption_ends_the_improvement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path)

    def run(request: Request, asked: Experiment, emit: Emit) -> int:
        return INTERRUPTED if asked.name == "screening" else runs(request, asked, emit)

    monkeypatch.setattr(improve, "run", run)
    assert improve.run_and_improve(Request(file=tmp_path / "x.yaml"), experiment(), lambda event: None) == INTERRUPTED
    assert [each.name for each in runs.asked] == ["wasteful"]


def test_without_improve_or_a_leader_nothing_is_tried(improved: Callable[..., Improved]) -> None:
    _, asked, _ = improved(improve=None)
    assert len(asked) == 1
    _, asked, events = improved(lambda cell, block: None)
    assert len(asked) == 1 and any("no setting was measured that makes a claim" in text for text in notes(events))


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def test_an_error_of_a_step_ends_the_improvement_and_not_the_run(
    improved: Callable[..., Improved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, events = Runs(tmp_path), []

    def run(request: Request, asked: Experiment, emit: Emit) -> int:
        if asked.name in STEPS:
            raise ClusterError("no node answers")
        return runs(request, asked, emit)

    monkeypatch.setattr(improve, "run", run)
    assert improve.run_and_improve(Request(file=tmp_path / "x.yaml"), experiment(), events.append) == 0
    assert "The improvement ended: no node answers" in notes(events)


def test_windows_are_shortened_and_candidates_left_out_as_the_time_asks_for(
    improved: Callable[..., Improved],
) -> None:
    long = {"throughput": {**WASTEFUL["throughput"], "window_seconds": 5.0, "window_steps": 50}}
    _, (_, screening, *_), _ = improved(improve="10s", **long)  # trials of 2 s in run_folders
    assert screening.throughput and screening.throughput.window_seconds == pytest.approx(0.53, rel=0.1)
    assert screening.throughput.window_steps in (5, 6)
    assert len(screening.cells) == 1 + 3  # of five candidates


def test_the_run_resumes_with_another_time_and_the_command_to_go_on_has_it(tmp_path: Path) -> None:
    folder = RunFolder.open(make_run(tmp_path, experiment(), rate))
    assert same_experiment(folder, experiment(improve=None)) and same_experiment(folder, experiment(improve="9m"))
    assert resume_command(Request(tmp_path / "x.yaml", improve=300.0), folder.path).count("--improve 300s") == 1


def offered(tmp_path: Path, allow: tuple[str, ...] = (), **changes: Any) -> list[dict[str, Any]]:
    results = harness.load(make_run(tmp_path, experiment(**changes), rate))
    context = Context(results)
    cell_id = improve.best_cell(context)
    assert cell_id
    return [dict(change) for change in candidates(cell_id, context, allow)]


def test_micro_batches_that_follow_from_the_devices_are_not_tried(tmp_path: Path) -> None:
    grid = {**GRID, "per_device_batch_size": 16, "global_batch_size": 128, "training.accumulation": "auto"}
    given = [change for change in offered(tmp_path, grid=grid, training={}) if "training.accumulation" in change]
    assert not given


def test_what_changes_the_training_is_tried_only_if_it_is_allowed(tmp_path: Path) -> None:
    plain = {"strategy_options": {}, "training": {}}
    speed_alone = [{"ddp.gradient_as_bucket_view": True}, {"ddp.bucket_cap_mb": 1}, {"ddp.bucket_cap_mb": 100}]
    assert offered(tmp_path, **plain) == speed_alone
    assert offered(tmp_path, ("compile",), **plain)[-1] == {"compile": True}
    assert offered(tmp_path, ("precision",), **plain)[-1] == {"precision": "bf16"}
    assert offered(tmp_path, ("batch",), **plain)[-1] == {"per_device_batch_size": 128}
    strong = {"grid": {**GRID, "per_device_batch_size": None, "global_batch_size": [64]}}
    assert offered(tmp_path, ("batch",), **strong, **plain)[-1] == {"global_batch_size": 128}


def test_what_the_file_asks_for_is_tried_without_and_what_it_varies_is_not(tmp_path: Path) -> None:
    asked = offered(tmp_path)
    assert {"training.accumulation": 1} in asked and {"ddp.find_unused_parameters": False} in asked
    varied = offered(tmp_path, training={"accumulation": [1, 4]})
    assert not any("training.accumulation" in change for change in varied)


def test_changes_of_different_axes_are_combined_the_best_value_of_each() -> None:
    a, b, c = {"a": 1}, {"b": 1}, {"c": 1}
    assert combined([]) == combined([a]) == combined([a, {"a": 2}]) == []
    assert combined([a, {"a": 2}, b, c]) == [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"improve": "soon"}, "improve.time: got 'soon'; allowed: a number of seconds, or '90s'"),
        ({"improve": {"time": "5m", "allow": "speed"}}, "improve.allow"),
        ({"workload": "a:B", "variants": {"a": ".", "b": ".."}}, "improve: not together with variants"),
        ({"throughput": None, "convergence": {"epochs": 1}}, "improve: needs a throughput section"),
    ],
)
def test_a_wrong_section_is_one_error(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ExperimentError, match=re.escape(words)):
        experiment(**content)


def test_the_option_replaces_the_time_of_the_file_and_is_refused_where_it_has_no_meaning() -> None:
    longer = with_improvement(experiment(improve={"time": "5m", "allow": ["batch"]}), 600.0).improve
    assert longer and (longer.time, longer.allow) == (600.0, ("batch",))
    script = {"name": "s", "script": "train.py", "grid": {"devices": [1], "per_device_batch_size": [1]}}
    with pytest.raises(ExperimentError, match="options are the script's own; make them axes of the grid"):
        with_improvement(parse_experiment(script, source="test"), 60.0)
    with pytest.raises(ExperimentError, match="needs a throughput section"):
        with_improvement(experiment(throughput=None, improve=None, convergence={"epochs": 1}), 60.0)
    two = experiment(improve=None, variants={"old": "a", "new": "b"}, workload="work:Work", workload_options={})
    with pytest.raises(ExperimentError, match="not together with variants"):
        with_improvement(two, 60.0)
    (mistake,) = mistakes(Request(Path("x"), improve=1.0, inline=True))
    assert "it measures in worker groups; leave out --inline" in str(mistake)
    in_store = Request(Path("x"), yaml.safe_dump(WASTEFUL), store="s3://b/f")
    with pytest.raises(ExperimentError, match="improve: its runs are in the local run folder; leave out --output URI"):
        read_experiment(in_store)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"grid": {"per_device_batch_size": "max"}, "convergence": {"epochs": 1}}, "max is another batch for each"),
        ({"improve": "5m", "limits": {"device_hours": 4}}, "improve: not together with limits.cost or limits.device"),
    ],
)
def test_sections_that_contradict_each_other_are_refused_in_a_file_and_read_in_a_recorded_run(
    sections: dict[str, Any], words: str
) -> None:
    content = {"name": "x", "grid": {"per_device_batch_size": 8}, **sections}
    with pytest.raises(ExperimentError, match=words):
        read_experiment(Request(Path("x.yaml"), yaml.safe_dump(content)))
    assert parse_experiment(content, source="x")


def test_the_improvement_ends_with_the_wall_time_of_the_run(improved: Callable[..., Improved]) -> None:
    _, asked, events = improved(limits={"wall": "1s"})
    assert len(asked) == 1 and any("no time is left" in text for text in notes(events))
