"""The report from recorded files: self-contained, escaped, without torch or ray."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

import harness
from harness.analysis.results import TABLES, Results, load
from harness.cli.arguments import FAILED, exit_code_of
from harness.errors import RunFolderError, WriteError
from harness.plan.planner import Plan
from harness.plan.trial import Trial, TrialResult
from harness.record.folder import RunFolder
from harness.record.lines import SCHEMA
from harness.record.schema import DERIVED, EQUIVALENCE, NOISE, PARITY, RECORDED, SCALING, TRIALS, VERSUS, WATERFALL
from harness.report import html, summary
from harness.report.figures import FIGURES, Drawing
from harness.report.figures.drawing import make_grid
from harness.report.html import IncompleteReport, Picture, write_report
from harness.report.page import Part, Parts
from harness.report.table_sections import DETAILS, Section, make_pages
from harness.report.table_sections import SCALING as SECTIONS
from harness.report.tables.cost import unexplained_table
from harness.report.tables.text import Heading, TextTable
from harness.report.tables.trust import belief_lines
from harness.report.verdict import make_verdict
from tests import run_folders
from tests.conftest import Make, plan_of
from tests.processes import run_without
from tests.records import rank_row

pytestmark = pytest.mark.usefixtures("no_figures")  # ``written``, of the module, is made before and has all


EPOCHS = {"epoch": [1, 2], "samples": [100, 200], "train_s": [1.0, 2.0], "evaluation_s": [0.1, 0.1]}
EPOCHS |= {"train_loss": [1.0, 0.5], "val_loss": [1.0, 0.6], "val_accuracy": [0.5, 0.96]}
NODE = {**run_folders.NODE, "host": "<script>alert(1)</script>", "variables": {"OMP_NUM_THREADS": "1"}}
LACKS_KEYS = r"environment.jsonl: is damaged or incomplete \(ValueError: groups.0"
NOWHERE: Any = {"attempt": 1, "invocation": 0, "group_id": None, "position": None}


def measured(trial: Trial, *, of_rank: dict[str, Any] | None = None, **facts: Any) -> TrialResult:
    """Return what a trial measured: two epochs, or five steps in a window of warm-up and as many in a timed one."""
    devices = range(trial.cell.devices)
    ranks = tuple({**rank_row(rank), "peak_memory_bytes": 2**30, **(of_rank or {})} for rank in devices)
    common: Any = {"ranks": ranks, "unit": "samples", "trial_s": 2.0, "steps_s": 1.5}
    if trial.kind == "convergence":
        return TrialResult(trial.id, "ok", epochs=EPOCHS, **common)
    steps = [(rank, window, step) for rank in devices for window in (0, 1) for step in range(5)]
    columns: Any = dict(zip(("rank", "window", "step"), map(list, zip(*steps, strict=True)), strict=True))
    columns |= {"warmup": [not window for window in columns["window"]], "loss": [1.0] * len(steps)}
    columns |= {"step_s": [0.1 + 0.01 * step for step in columns["step"]], "wait_s": [0.01] * len(steps)}
    timed: Any = {"duration_s": 0.6, "steps": 5, "weight": 40.0}
    kinds: Any = enumerate(("warmup", "timed"))
    windows: Any = [{"rank": rank, "window": n, "window_kind": kind, **timed} for n, kind in kinds for rank in devices]
    return TrialResult(trial.id, "ok", windows=tuple(windows), steps=columns, facts=facts, **common)


def append_skips(folder: RunFolder, plan: Plan, reason: str = "") -> None:
    for trial, skip in plan.skips.items():
        result = TrialResult(trial.id, "skipped", reason or skip.text, skip_code=skip.code)
        folder.append(trial, result, NOWHERE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder without a report."""
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": [8, 16]}
    convergence = {"epochs": 2, "seeds": [0, 1], "target": {"metric": "val_accuracy", "at_least": 0.95}}
    plan = plan_of(grid, throughput={"blocks": 2}, convergence=convergence)
    place = tmp_path_factory.mktemp("recorded")
    folder = RunFolder.create(place, plan.experiment, plan, "name: test # <b>as given</b>\n")
    folder.set_invocation(0, {"started_at": 1.7e9, "git_commit": "abcdef1234567890", "wall_s": 90.0})
    folder.add_environment({"group_id": "b0-g0", "invocation": 0, "whole_s": 30.0, "nodes": [NODE], "ranks": []})
    failing = next(trial.id for trial in plan.trials if trial.kind == "throughput" and trial.block == 1)
    for number, trial in enumerate(plan.trials):
        error = TrialResult(trial.id, "error", "ValueError on rank 0: <i>bad</i>", detail="Traceback ...")
        at: Any = {"attempt": 1, "invocation": 0, "group_id": "b0-g0", "position": number}
        folder.append(trial, error if trial.id == failing else measured(trial), at)
    append_skips(folder, plan)
    return folder


@pytest.fixture
def run_folder(recorded: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of its own for a test that writes a report."""
    return RunFolder(shutil.copytree(recorded.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def written(recorded: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The same with its report, three figures and one that is left out, for tests that read it."""
    folder = RunFolder(shutil.copytree(recorded.path, tmp_path_factory.mktemp("written") / "run"))
    drawn = ("throughput", "step_times", "convergence", "links")
    with imports_blocked("torch", "torchvision", "ray"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "FIGURES", {name: FIGURES[name] for name in drawn})
        write_report(folder.path)
    return folder


@contextmanager
def imports_blocked(*packages: str) -> Iterator[None]:
    """Make these packages fail to import, those too that this process has imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] in packages]:
            patch.delitem(sys.modules, name)
        for name in packages:
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture
def results(recorded: RunFolder) -> Results:
    """Its results, whose tables a test may replace."""
    return harness.load(recorded.path)


def test_a_withheld_waterfall_with_traces_keeps_its_place_for_their_links() -> None:
    links = [("traces/a-rank0.json.gz", "single x1")]
    assert Picture("waterfall", "t", links=links).is_shown and not Picture("waterfall", "t").is_shown


def test_tables_figures_and_report_are_written_without_torch_and_ray(written: RunFolder) -> None:
    with imports_blocked("torch"), pytest.raises(ImportError, match="torch"):
        importlib.import_module("torch")
    for name in ("trials", "cells", "scaling", "convergence", "outcomes", "ranks", "windows"):
        assert (written.path / "tables" / f"{name}.csv").stat().st_size > 0
    pictures = sorted(path.name for path in written.figures.iterdir() if path.stat().st_size > 1000)
    drawn = ("convergence", "step_times", "throughput")
    assert pictures == [f"{name}.{kind}" for name in drawn for kind in ("png", "svg")]
    assert all((written.path / f"{name}.parquet").exists() for name in ("steps", "epochs"))


def test_the_report_of_an_incomplete_run_names_missing_trials(tmp_path: Path) -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = plan_of(grid, throughput={"blocks": 4})
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    first = next(trial for trial in plan.trials if trial.cell.devices == 2)
    others = [trial for trial in plan.trials if trial != first]
    second = others[0]
    folder.append(first, TrialResult(first.id, "error", "ValueError on rank 0: bad", detail="Traceback"), NOWHERE)
    for ended, running, reason in (
        ({}, {}, "not started: the run was killed, or is still going on"),
        ({"ended": "finished"}, {}, "not started: it was no part of the last call (--only, or another machine)"),
        ({"ended": "interrupted"}, {"running": second.id}, "not started: the run was interrupted"),
    ):
        folder.set_invocation(0, {"started_at": 1.7e9, **ended, **running})  # type: ignore[typeddict-item]
        missing = load(folder.path).missing.set_index("trial_id")["reason"]
        assert missing.index.tolist() == [trial.id for trial in others]
        assert set(missing.drop(second.id)) == {reason}
        assert missing[second.id].startswith("cut short" if running else "not started")
    folder.set_invocation(0, {"differs": ["torch 2.14.0 -> 2.15.0"]})
    write_report(folder.path)
    html = folder.report.read_text()
    assert ">11 of 12 planned trials have no result</b>: " in html
    assert ">1 trial failed with an error</b>: ValueError on rank 0: bad (ddp on 2 devices" in html
    assert "Trials without a result" in html and reason in html
    assert "single x1" in html and "1 to 3" in html  # which cell, in which blocks
    assert "Invocation 0 differs from the one before: torch 2.14.0 -&gt; 2.15.0." in html


@pytest.mark.parametrize("outcomes", [[], ["lost"]], ids=["killed before its first trial", "all failed"])
def test_a_run_that_measured_nothing_has_a_report(tmp_path: Path, outcomes: list[Any]) -> None:
    plan = plan_of(throughput={"blocks": 1})
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    for trial, outcome in zip(plan.trials, outcomes, strict=False):
        folder.append(trial, TrialResult(trial.id, outcome, "gone"), NOWHERE)
    results = write_report(folder.path)
    assert len(results.missing) == len(plan.trials) - len(outcomes)
    assert "Nothing was measured" in folder.report.read_text()


def test_every_derived_table_of_the_schema_is_written() -> None:
    missing = {table.name for table in DERIVED} - set(TABLES)
    assert not missing, f"tables of record/schema/derived.py without a line in TABLES of analysis/results.py: {missing}"
    unknown = set(TABLES) - {table.name for table in (*DERIVED, *RECORDED)}
    assert not unknown, f"tables in TABLES of analysis/results.py without a schema in record/schema/: {unknown}"


def test_a_section_without_rows_is_left_out_or_is_a_sentence() -> None:
    empty = Section(Part("Title", "title"), lambda results: TextTable((Heading("a"),), ()), "Words above the rows.")
    results = Results(RunFolder(Path("/nonexistent")))
    assert make_pages([empty], results, Parts()) == []
    (page,) = make_pages([replace(empty, empty=lambda results: "None of them.")], results, Parts())
    assert (page.title, page.words) == ("Title", "None of them.")


def test_the_report_is_one_self_contained_file_whose_links_lead_to_its_places(written: RunFolder) -> None:
    html = written.report.read_text()
    assert html.count("data:image/png;base64,") == 3 and "<li>Bus bandwidth against size: no links" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", html)
    assert html.count("<script") == html.count("<script>") == 1
    assert len(re.findall(r'<i style="left:[^"]*" title="[^"]+"></i>', html)) >= 20  # the values of the figures' marks
    anchors = re.findall(r'id="([^"]+)"', html)
    links = re.findall(r'href="#([^"]+)"', html)
    assert len(links) > 10 and set(links) <= set(anchors)
    assert len(anchors) == len(set(anchors))
    ordered = ("verdict", "scaling", "figure-convergence", "outcomes", "appendix", "ledger", "configuration")
    places = [html.index(f'id="{name}"') for name in ordered]
    assert places == sorted(places)


def test_the_report_shows_configuration_measurements_and_failures_as_text_that_is_escaped(written: RunFolder) -> None:
    html = written.report.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<i>bad</i>" not in html and "&lt;i&gt;bad&lt;/i&gt;" in html
    assert "<b>as given</b>" not in html
    text = re.sub(r"<[^>]+>", " ", html)
    section = ("weak scaling: the per-device batch is fixed", "Target: val_accuracy at least 0.95", "2 of 2")
    skipped, failed = "too few devices: needs 4 on one node, has 2 CPU slots", "1 trial failed with an error :"
    for words in (*section, skipped, failed, "Some CPU, 2 cores", "git abcdef123456", "1 min 30 s"):
        assert words in text, words


@pytest.mark.slow
def test_the_command_rebuilds_the_report_without_torch_and_ray(written: RunFolder, run_folder: RunFolder) -> None:
    script = "import runpy\nfrom harness.report import html\nhtml.FIGURES = {}\n"
    script += f"sys.argv = ['harness.report', {str(run_folder.path)!r}]\n"
    script += "runpy.run_module('harness.report', run_name='__main__')\n"
    done = run_without(("torch", "torchvision", "ray"), script)
    assert done.returncode == 0, done.stderr[-2000:]
    first, again = ((folder.path / "tables" / "scaling.csv").read_text() for folder in (written, run_folder))
    assert again == first and run_folder.report.exists()


def test_steps_that_cannot_be_written_are_an_error_although_the_tables_can(run_folder: RunFolder) -> None:
    (run_folder.path / "steps.parquet" / "in the way").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"steps\.parquet: cannot be written"):
        write_report(run_folder.path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trials.jsonl", "{}\n", "damaged or incomplete"),
        ("environment.jsonl", '{"group": {}}\n', LACKS_KEYS),
        ("plan.json", json.dumps({"schema": SCHEMA, "machine": {"devices_per_node": ["x"]}}), "devices_per_node.0"),
        ("experiment.yaml", None, "damaged or incomplete"),
        (".", None, "not a run folder"),
    ],
)
def test_a_damaged_folder_is_one_error_only(run_folder: RunFolder, name: str, text: str | None, message: str) -> None:
    if name == ".":
        shutil.rmtree(run_folder.path)
        run_folder.tables.mkdir(parents=True)
    elif text is None:
        (run_folder.path / name).unlink()
    else:
        (run_folder.path / name).write_text(text)
    with pytest.raises(RunFolderError, match=message):
        write_report(run_folder.path)
    assert not run_folder.report.exists() and not list(run_folder.tables.iterdir())


def broken(results: Results) -> Any:
    raise KeyError("no such column <b>")


def dot(results: Results) -> Drawing:
    """Return a figure that takes no time."""
    return Drawing("Throughput", "A dot.", make_grid(1, 1, (1.0, 1.0))[0])


def tables_with_rows(run_folder: RunFolder) -> set[str]:
    results = load(run_folder.path)
    return {name for name in TABLES if len(getattr(results, name))}


def test_an_error_in_a_figure_costs_that_figure(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_folder.path / "trials.jsonl").read_bytes()
    (run_folder.figures / "bad.png").write_bytes(b"of an earlier report")
    monkeypatch.setattr(html, "FIGURES", {"bad": broken, "throughput": dot})
    assert exit_code_of(lambda: bool(write_report(run_folder.path))) == FAILED
    output = capsys.readouterr().err
    log = run_folder.path / "logs" / "report.txt"
    assert "damaged" not in output and str(log) in output
    cause = "the figure bad failed by an error of the harness: KeyError: 'no such column <b>', in test_html.py line"
    assert f"  - {cause}" in output
    assert "in broken" in log.read_text()
    page = run_folder.report.read_text()
    assert re.search(r'<figure id="figure-bad"><h3>Bad</h3>\s*<p class="bad">the figure bad failed by an error', page)
    assert "column &lt;b&gt;" in page and "data:image/png;base64," in page
    assert sorted(path.name for path in run_folder.figures.iterdir()) == ["throughput.png", "throughput.svg"]
    assert {path.stem for path in run_folder.tables.iterdir()} == tables_with_rows(run_folder)
    assert (run_folder.path / "trials.jsonl").read_bytes() == before


def test_the_appendix_has_its_figures_without_tables(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "FIGURES", {"throughput": dot, "links": dot})
    monkeypatch.setattr(html, "APPENDIX", ())
    write_report(run_folder.path)
    page = run_folder.report.read_text()
    _, folded = page.split('<h2 id="appendix">Appendix</h2>')
    assert folded.lstrip().startswith("<details><summary>Throughput</summary>") and 'href="#appendix"' in page
    assert folded.index('id="figure-links"') < folded.index("</details>")
    monkeypatch.setattr(html, "FIGURES", {"throughput": dot})
    write_report(run_folder.path)
    assert not re.search('["#]appendix"', run_folder.report.read_text())


def test_the_page_folds_the_second_figure_and_leaves_others_to_the_folder(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def several(results: Results) -> Drawing:
        drawings = [dot(results) for _ in range(3)]
        return replace(drawings[0], more=[one.figure for one in drawings[1:] if one.figure])

    monkeypatch.setattr(html, "FIGURES", {"throughput": several})
    write_report(run_folder.path)
    names = {path.name for path in run_folder.figures.glob("*.png")}
    assert names == {"throughput.png", "throughput_2.png", "throughput_3.png"}
    page = run_folder.report.read_text()
    figure = page[page.index('id="figure-throughput"') : page.index("</figure>")]
    assert figure.count("data:image/png") == 2
    assert figure.index("<summary>More of them") < figure.rindex("data:image/png") < figure.index("</details>")


def test_the_decision_and_the_leading_figures_come_before_the_reasons(written: RunFolder) -> None:
    page = written.report.read_text()
    decision = ['id="verdict"', "<dt>SURE</dt>", "<dt>OPEN</dt>", "<dt>NEXT</dt>"]
    leading = ['id="figure-throughput"', 'id="ranked"', 'id="reasons"', "<nav>"]
    places = [page.index(part) for part in (*decision, *leading)]
    assert places == sorted(places) and page.index('id="figure-convergence"') > places[-1]
    assert page.count('id="figure-throughput"') == 1
    reasons = page[page.index('id="reasons"') : page.index("<nav>")]
    assert "How far it scales" in reasons and "Fastest" in reasons and "What to do next" not in reasons


def test_without_a_figure_of_throughput_the_learning_curves_lead(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(results: Results) -> Drawing:
        return Drawing("Throughput", "Left out: no trial was timed.", None)

    monkeypatch.setattr(html, "FIGURES", {"throughput": nothing, "waterfall": nothing, "convergence": dot})
    write_report(run_folder.path)
    page = run_folder.report.read_text()
    assert page.index('id="figure-convergence"') < page.index('id="reasons"') and '"figure-throughput"' not in page


def test_an_error_in_a_table_costs_what_needs_it(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_folder.tables / "noise.csv").write_text("of an earlier report")
    written = tables_with_rows(run_folder) - {"noise"}
    monkeypatch.setitem(TABLES, "noise", broken)  # type: ignore[arg-type]
    twins = lambda results: Drawing("Twins", f"Left out: {len(results.noise)} twins.", None)  # noqa: E731
    monkeypatch.setattr(html, "FIGURES", {"twins": twins, "throughput": dot})
    with pytest.raises(IncompleteReport, match=r"the table noise, the figure twins, .*the section A/A test") as raised:
        write_report(run_folder.path)
    assert str(raised.value).count("KeyError") == 1  # one cause
    assert raised.value.results.noise.empty and "low" in raised.value.results.noise
    assert {path.stem for path in run_folder.tables.iterdir()} == written
    assert sorted(path.name for path in run_folder.figures.iterdir()) == ["throughput.png", "throughput.svg"]
    page = run_folder.report.read_text()
    assert '<h2 id="noise">A/A test</h2>\n<p class="bad">the section A/A test failed' in page
    assert "This report lacks parts" in page and "Throughput and scaling" in page
    verdict = page[page.index('id="verdict"') : page.index("<nav>")]
    assert "<dt>OPEN" in verdict and "How sure" not in verdict and "Table noise</b>: failed by" in verdict


@pytest.mark.parametrize("table", ["scaling", "leaders", "cells", "waterfall", "ledger", "convergence", "findings"])
def test_the_verdict_goes_without_any_table(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    monkeypatch.setitem(TABLES, table, broken)  # type: ignore[arg-type]
    found = make_verdict(load(run_folder.path))
    assert found.slots == "A device is a process with 1 CPU thread." and found.brackets.endswith(found.slots)
    assert ("Fastest" in found.by_heading) == (table != "leaders")
    named = [sentence.lead for sentence in found.sentences if sentence.lead.startswith("Table")]
    assert len(named) == (table != "ledger") and all(table in lead for lead in named)


def test_an_error_in_a_section_or_verdict_costs_that(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "DETAILS", (Section(Part("Broken", "broken"), broken), *DETAILS))
    monkeypatch.setattr(html, "make_verdict", broken)
    with pytest.raises(IncompleteReport, match="the verdict, the section Broken failed"):
        write_report(run_folder.path)
    page = run_folder.report.read_text()
    assert '<h2 id="broken">Broken</h2>\n<p class="bad">the section Broken failed' in page
    assert "Trial outcomes" in page


def test_an_error_of_the_page_itself_is_no_damage(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunFolder, "source_text", broken)
    assert exit_code_of(lambda: bool(write_report(run_folder.path))) == FAILED
    output = capsys.readouterr().err
    assert "damaged" not in output
    assert "the report failed by an error of the harness: KeyError: 'no such column <b>', in test_html.py" in output
    assert "in broken" in (run_folder.path / "logs" / "report.txt").read_text()
    assert not run_folder.report.exists() and not list(run_folder.tables.iterdir())


def tables(noise: pd.DataFrame, trials: pd.DataFrame) -> dict[str, pd.DataFrame]:
    empty = {table.name: table.frame([]) for table in (SCALING, VERSUS, PARITY, EQUIVALENCE)}
    return {**empty, "noise": noise, "trials": trials}


def test_the_summary_shows_the_noise_floor_of_each_base_and_doubts() -> None:
    noise = NOISE.frame([{"ratio": 1.0, "low": 0.9, "high": 1.1, "excludes_one": False}, {"ratio": 1.0}])
    names: list[tuple[str, ...]] = [("wide spread",), (), ("wide spread", "slow rank 1")]
    trials = TRIALS.frame([{"throughput_per_s": 1.0, "outcome": "ok", "doubts": doubts} for doubts in names])
    assert belief_lines(tables(noise, trials)) == [
        "One setting measured twice, the second over the first (A/A test of the base, 95 % interval): 0.900 to 1.100. "
        "Ratios are to the mean of both.",
        "Usual in this run: the times of single steps vary widely (wide spread, in 2 of 3 timed trials). "
        "A cell is marked (?) for other doubts, or for clearly more.",
        "Reasons to distrust a number (?), by timed trials: one device was slower than the others "
        "(slow rank 1, in 1 of 3).",
    ]
    one = NOISE.frame([{"ratio": 1.0}])
    assert belief_lines(tables(one, trials[:0])) == ["A/A test: without an interval, which needs 3 blocks."]
    why = "unknown: the check ended as oom: out of memory"
    row = {"strategy": "ddp", "devices": 2, "emulated": False, "oversubscribed": False, "reason": why}
    unknown = {**tables(one, trials[:0]), "equivalence": EQUIVALENCE.frame([row, {**row, "computed_in": "bf16"}])}
    said = "Equivalence to one device unknown (!): ddp x2 (the check ended as oom: out of memory)."
    assert said in belief_lines(unknown)
    off = NOISE.frame([{"ratio": 1.2, "low": 1.1, "high": 1.3, "excludes_one": True}])
    (reported,) = belief_lines(tables(off, trials[:0]))
    assert reported.endswith("1 of 1 exclude 1; 1 in 20 does by chance. Ratios are to the mean of both.")
    row = {"low": 0.9, "high": 1.1, "excludes_one": False}
    noise = NOISE.frame([{**row, "setting": f"batch {batch}/device"} for batch in (8, 16)])
    (reported,) = belief_lines(tables(noise, trials[:0]))
    assert reported.endswith(
        ": batch 8/device: 0.900 to 1.100; batch 16/device: 0.900 to 1.100. Ratios are to the mean of both."
    )


def test_the_size_of_a_run_cells_without_diagnostics_and_the_time_of_checks_are_reported(results: Results) -> None:
    size = "trials: 1 error, 15 ok, 4 skipped · 6 cells measured · took 1 min 30 s until the report"
    assert summary.size(results) == size
    assert unexplained_table(results.trials, results.waterfall).rows == ()
    trials = results.trials.copy()
    ok = trials.index[trials["outcome"] == "ok"][0]
    trials.loc[ok, "explain_error"] = "its communication cannot be taken away"
    (row,) = unexplained_table(trials, results.waterfall).rows
    assert row.cells[0].startswith(f"{trials['strategy'][ok]} x{trials['devices'][ok]}")
    assert row.cells[1] == "its communication cannot be taken away"
    rows = [{"label": part, "part": part, "reason": "why"} for part in ("rest", "exposed communication")]
    unknown = unexplained_table(results.trials, WATERFALL.frame(rows)).rows
    assert [row.cells for row in unknown] == [("rest", "why")], "a part with two measurements is explained"
    purposes = {"a": "", "b": "equivalence", "c": "doctor", "d": "links"}
    trials = TRIALS.frame([{"trial_id": name, "purpose": purpose} for name, purpose in purposes.items()])
    rows = [("trial", name, seconds) for name, seconds in zip(purposes, (80.0, 4.0, 1.0, 1.0), strict=True)]
    ledger = pd.DataFrame([*rows, ("group", None, 14.0)], columns=["level", "trial_id", "seconds"])
    vars(results).update(ledger=ledger, trials=trials)
    assert summary.checks_words(results) == "Equivalence checks, preflight and links took 6.0 % of the run."
    vars(results)["trials"] = trials[:1]
    assert summary.checks_words(results) == ""


def test_the_limits_of_gpus_stand_beside_the_gpus() -> None:
    card: Any = {"power_limit_w": 700.0, "usual_power_limit_w": 700.0, "ecc": True, "pcie_generation": 5}
    card |= {"pcie_width": 16, "most_pcie_width": 16}
    one = "power limit 700 W, ECC on, PCIe 5.0 x16"
    assert ("each GPU", one) in summary.node_facts(NODE | {"topology": {"cards": [card, card]}})
    adapter = {"name": "mlx5_0", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)", "numa": 1, "nearest": [2]}
    facts = summary.node_facts(NODE | {"adapters": [adapter]})  # type: ignore[operator]
    assert ("RDMA adapters", "InfiniBand at 400 Gb/sec (4X NDR): mlx5_0 at NUMA node 1 (GPU 2)") in facts
    assert summary.cards_text([card, card | {"ecc": None, "pcie_generation": None}]) == (
        f"GPU 0: {one}; GPU 1: power limit 700 W, PCIe x16"
    )
    unknown = dict.fromkeys(card)
    assert summary.cards_text([card, unknown]) == f"GPU 0: {one}; GPU 1: unknown"  # type: ignore[list-item]
    for node in (NODE, NODE | {"topology": None}, NODE | {"topology": {"cards": [unknown]}}):
        assert "each GPU" not in dict(summary.node_facts(node))


def test_the_variables_of_a_node_are_its_first_without_those_of_cells(make_experiment: Make) -> None:
    recorded = [{"OMP_NUM_THREADS": "1", "NCCL_ALGO": "a", "NCCL_PROTO": "b"}, {"OMP_NUM_THREADS": "2"}]
    environment: Any = {"groups": [{"nodes": [NODE | {"variables": variables}]} for variables in recorded]}
    grid = {"strategy": "single", "devices": 1, "per_device_batch_size": 8, "env.NCCL_ALGO": ["a", None]}
    ((_, facts),) = cast("Any", summary.facts(environment, make_experiment(grid, env={"NCCL_PROTO": "b"}))["nodes"])
    assert dict(facts)["variables"] == "OMP_NUM_THREADS=1"


def test_positive_nice_values_and_their_differences_are_reported() -> None:
    assert not [fact for fact in summary.node_facts(NODE) if fact[0] == "niceness"]
    assert ("niceness", "15: the ranks yield to other processes") in summary.node_facts(NODE | {"niceness": 15})
    groups = [{"nodes": [NODE | {"niceness": nice}]} for nice in (0, 15)]
    assert summary.difference({"groups": groups}).startswith("Worker groups saw different hardware or software on")
    assert summary.difference({"groups": groups[:1] * 2}) == ""


def test_a_run_without_throughput_has_no_section_on_it(tmp_path: Path) -> None:
    convergence = {"epochs": 2, "seeds": [0], "target": {"metric": "val_accuracy", "at_least": 0.95}}
    for throughput in (None, {"blocks": 1}):
        plan = plan_of(throughput=throughput, convergence=convergence)
        results = load(RunFolder.create(tmp_path, plan.experiment, plan, "x").path)
        titles = [part.title for part in make_pages(SECTIONS, results, Parts())]
        assert ("Throughput and scaling" in titles) == ("0 cells measured" in summary.size(results)) == bool(throughput)
