"""What the terminal shows: names and messages of others as text and nothing else; the time left of a run."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

import harness
from harness.analysis import trials as trial_tables
from harness.analysis.ratios import noise, parity, scaling, versus
from harness.analysis.results import TABLES
from harness.plan.planner import GROUP_START_S, Plan, make_plan
from harness.plan.trial import Trial
from harness.record.schema import EQUIVALENCE, FINDINGS, PREVIEW
from harness.report.sentence import Sentence
from harness.report.tables.text import Heading, Line, TextTable
from harness.report.verdict import NO_VERDICT, Verdict
from harness.run.console import ConsoleSink, rich_table, trial_result
from harness.run.events import (
    DoctorFinished,
    Event,
    GroupReady,
    GroupStarting,
    Note,
    Planned,
    Reported,
    RunStarted,
    TrialEnded,
    TrialStarting,
)
from harness.run.plan_text import plan_table
from harness.run.request import as_started
from harness.run.time_left import TimeLeft, rounded
from tests.conftest import EXAMPLE, Make, gpu_cluster, laptop
from tests.records import line, steps_of

HOSTILE = "[/bold][red]x[/nope] \x1b[2J\x1b]0;owned\x07 \x9b31m \u202egpj \r0 ok [link=http://x]y"

HOSTILE_FINDING = {
    "strategy": "ddp",
    "label": HOSTILE,
    "check": HOSTILE,
    "severity": "error",
    **dict.fromkeys(("seen", "means", "advice"), HOSTILE),
}


def shown(*events: Event, **options: Any) -> str:
    """What the sink writes of these events to a terminal 200 columns wide, or as the options say."""
    out = io.StringIO()
    given = {"width": 200, "color_system": None, "legacy_windows": False, **options}
    sink_options = {name: given.pop(name, False) for name in ("quiet", "verbose")}
    with ConsoleSink(Console(file=out, **given), **sink_options) as sink:
        for event in events:
            sink(event)
    return out.getvalue()


def printed(*tables: Table) -> list[str]:
    out = io.StringIO()
    for table in tables:
        Console(file=out, width=80).print(table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("terminal", [False, True])
def test_names_and_messages_are_text(make_experiment: Make, tmp_path: Path, terminal: bool) -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": 8, "model": [HOSTILE, "b"]}
    plan = make_plan(make_experiment(grid, workload="own:Own", convergence={"epochs": 1}), laptop())
    lines = [
        line(cell, model=HOSTILE, options={"workload.note": cell}, strategy=strategy, rates=rates)
        for cell, strategy, rates in (("single", "single", (100.0,)), ("ddp2", "ddp", (80.0, 80.0)))
    ]
    trials = trial_tables.trials(lines, steps_of(lines))
    tables = {function.__name__: function(trials) for function in (scaling, noise, versus, parity)}
    tables |= {"trials": trials, "equivalence": EQUIVALENCE.frame([]), "findings": FINDINGS.frame([HOSTILE_FINDING])}
    trial = plan.groups[0].trials[0]
    said = Sentence("fastest", HOSTILE, HOSTILE, HOSTILE)
    output = shown(
        Planned(plan),
        RunStarted(tmp_path / HOSTILE.replace("/", "_"), plan, plan.groups, 0),
        GroupStarting(plan.groups[0]),
        TrialStarting(trial),
        TrialEnded(trial, {**lines[0], "outcome": "error", "reason": HOSTILE}, False),
        Note(HOSTILE),
        Reported(tmp_path, tmp_path / "[red]report.html", tables, Verdict((said,), lines={"USE": [said]}), 3.0),
        force_terminal=terminal,
        width=4000,
    )
    assert "[/bold][red]x[/nope] \\x1b[2J\\x1b]0;owned\\x07 \\x9b31m \\u202egpj" in output
    assert "[red]report.html" in output
    for character in ("\x1b]0", "\x1b[2J\x1b]", "\x07", "\x9b", "\u202e", "\x1b[31m"):
        assert character not in output


def test_the_command_is_the_last_line_and_what_is_incomplete_the_verdicts_first(tmp_path: Path) -> None:
    by_label = {
        "INCOMPLETE": [Sentence("incomplete", "3 cells have no result", "interrupted.")],
        "USE": [Sentence("fastest", "ddp on 2 devices", "fast.")],
        "NEXT": [Sentence("next", "", "It is small:", "python -m harness.run " + "a" * 90)],
    }
    said = tuple(by_label["NEXT"])
    tables = {"trials": trial_tables.trials([line()], steps_of([line()]))}
    lines = shown(
        Reported(tmp_path, tmp_path / "report.html", tables, Verdict(said, lines=by_label, slots="A slot."), 3.0),
        width=80,
    ).splitlines()
    assert lines[-1] == as_started(said[0].command) and lines[-2].rstrip() == "NEXT        It is small:"
    verdict = [line for line in lines if line.startswith(tuple(by_label))]
    assert [line.split("  ")[0] for line in verdict] == ["INCOMPLETE", "USE", "NEXT"]
    assert "of the whole grid. A slot." in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_a_finding_are_indented_in_a_terminal_and_a_line_each_elsewhere(
    plan: Plan, tmp_path: Path, terminal: bool
) -> None:
    advice = "set workers: 2 " * 20
    findings = FINDINGS.frame([{**HOSTILE_FINDING, "advice": advice.strip()}])
    output = shown(DoctorFinished(findings, {}, plan), force_terminal=terminal, width=60)
    first = next(number for number, text in enumerate(output.splitlines()) if "  action  " in text)
    lines = [re.sub("\x1b\\[[0-9;]*m", "", text) for text in output.splitlines()[first:]]
    said = lines[: lines.index("")]
    assert (len(said) > 1) == terminal and " ".join(" ".join(said).split()) == f"action {advice.strip()}"
    if terminal:
        assert max(map(len, said)) <= 60 and all(text.startswith(12 * " ") and text[12] != " " for text in said[1:])


def test_a_failure_names_its_log_once_a_reason_and_the_command_begins_as_this_one_did(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = [{**line(), "outcome": "error", "reason": f"E on rank {n}: a", "log": f"logs/{n}.txt"} for n in range(2)]
    failed.append({**failed[0], "reason": "E on rank 0: b", "log": "logs/2.txt"})
    ended = [TrialEnded(plan.trials[0], each, False) for each in failed]  # type: ignore[arg-type]
    verdict = Verdict((Sentence("next", "", "", "python -m harness.run --resume r && python -m harness export r"),))
    monkeypatch.setattr(sys, "argv", ["here/.venv/bin/harness", "run"])
    reported = Reported(tmp_path, tmp_path / "report.html", {}, verdict, 3.0)
    output = shown(RunStarted(tmp_path, plan, plan.groups, 0), *ended, reported, width=4000)
    assert re.findall(rf"  its log: {tmp_path}/logs/(\d).txt\n", output) == ["0", "2"]
    assert output.splitlines()[-1] == "here/.venv/bin/harness run --resume r && here/.venv/bin/harness export r"
    monkeypatch.setattr(sys, "argv", ["/site/harness/run/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    started = ".venv/bin/python -m harness"
    assert as_started(verdict.command) == f"{started}.run --resume r && {started} export r"


def test_trials_that_are_skipped_for_one_reason_are_one_line_unless_all_are_asked_for(plan: Plan) -> None:
    reasons = ["decided", "decided", "too large", "decided"]
    ended = [
        TrialEnded(plan.trials[0], {**line(), "outcome": "skipped", "reason": each})  # type: ignore[arg-type]
        for each in reasons
    ]
    assert (shown(*ended).count("decided"), shown(*ended).count("too large")) == (1, 1)
    assert shown(*ended, verbose=True).count("decided") == 3


@pytest.mark.parametrize("done", [0, 3])
def test_the_estimate_before_a_run_is_no_grade_of_what_a_resume_took(plan: Plan, tmp_path: Path, done: int) -> None:
    measured = {"part": "measurement", "estimated_s": 80.0, "actual_s": 100.0, "device_hours": 0.25}
    tables = {"preview": PREVIEW.frame([measured]), "trials": trial_tables.trials([line()], steps_of([line()]))}
    reported = Reported(tmp_path, tmp_path / "report.html", tables, NO_VERDICT, 3.0)
    output = shown(RunStarted(tmp_path, plan, plan.groups, done), reported, width=4000)
    assert "Trials: 1 ok." in output and ("Estimated before the run: 1 min 20 s" in output) == (not done)


def test_findings_are_in_the_terminal_and_an_error_in_a_table_costs_that_table(tmp_path: Path) -> None:
    texts = {"seen": "64 of 256", "means": "samples are lost", "advice": "return all of them"}
    finding = {"strategy": "ddp", "label": "ddp x2", "check": "data sharding", "severity": "warning", **texts}
    output = shown(Reported(tmp_path, tmp_path / "r.html", {"findings": FINDINGS.frame([finding])}, NO_VERDICT, 3.0))
    for expected in ("warning data sharding: ddp x2", *texts.values()):
        assert expected in output
    tables = {"trials": trial_tables.trials([line()], steps_of([line()]))}  # the others raise
    reported = Reported(tmp_path, tmp_path / "report.html", tables, NO_VERDICT, 3.0)
    assert "scaling table failed" not in shown(reported, width=4000)
    output = shown(reported, width=4000, verbose=True)
    assert "scaling table failed by an error of the harness: KeyError: 'scaling', in console.py" in output
    assert "Trials: 1 ok." in output and "report.html\n" in output
    assert "KeyError" in (tmp_path / "logs" / "terminal.txt").read_text()


def test_tables_and_what_to_know_of_the_numbers_are_in_the_report_and_with_verbose(tmp_path: Path) -> None:
    tables = harness.load(EXAMPLE)
    named = {name: getattr(tables, name) for name in TABLES}
    reported = Reported(tmp_path, tmp_path / "report.html", named, NO_VERDICT, 3.0)
    short, whole = (shown(reported, width=80, verbose=verbose) for verbose in (False, True))
    assert "speedup" in whole and "first / second" in whole
    assert "speedup" not in short and "first / second" not in short and len(short.splitlines()) <= 20
    links = {**named, "scaling": named["scaling"].iloc[:0]}
    assert "first / second" in shown(Reported(tmp_path, tmp_path / "r.html", links, NO_VERDICT, 3.0), width=80)


def test_headings_ratios_and_titles_are_not_folded_on_80_columns(make_experiment: Make) -> None:
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 16], "nodes": [1, 2], "per_device_batch_size": 8}
    lines = printed(plan_table(make_plan(make_experiment(grid, convergence={"epochs": 1}), gpu_cluster(2))))
    headings = next(line for line in lines if "strategy" in line).split()
    assert headings == ["strategy", "devices", "workers", "cells", "throughput", "convergence", "added"]
    assert max(map(len, lines)) <= 80 and any("16 on 2 nodes" in line for line in lines)
    texts = (("first / second", False), ("setting", False), ("ratio (95 % interval)", True), ("n", True))
    ratio = ("ddp x2 / dp (emulated) x2", "resnet14 · batch 64/device", "1.175 (0.920 to 1.500)", "3")
    table = TextTable(tuple(Heading(*text) for text in texts), (Line(ratio),))
    assert [part in printed(rich_table(table, "Strategies"))[-1] for part in ratio] == [True] * 4
    narrow = rich_table(TextTable((Heading("n", True),), (Line(("3",)),)), "resnet34 · global batch 64")
    plan = make_plan(make_experiment({"per_device_batch_size": 8}, name="a-name-of-twenty-chars"), laptop())
    lines = printed(narrow, plan_table(plan))
    assert lines[0] == "resnet34 · global batch 64"
    assert f"Plan of {plan.experiment.name}: what the file asks for, and what is added" in lines


def test_the_start_of_a_worker_group_is_plain_text(make_experiment: Make) -> None:
    grid = {"strategy": ["dp", "ddp"], "devices": 2, "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}), gpu_cluster(1, 2))
    output = shown(*map(GroupStarting, plan.groups))
    for expected in ("1 worker with 2 devices: 1 trial", "2 workers with 1 device each: 1 trial"):
        assert f"Starting {expected} of block 0" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_a_training_is_shown_epoch_by_epoch_if_asked(make_experiment: Make, tmp_path: Path, terminal: bool) -> None:
    grid = {"strategy": "single", "devices": 1, "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, convergence={"epochs": 2}), laptop())
    trial = next(one for one in plan.trials if one.kind == "convergence")
    epochs = {"epoch": [1, 2], "train_loss": [2.0, 1.5], "learning_rate": [0.1, 0.1]}
    recorded = {**line(kind="convergence"), "steps_s": 2.0}
    ended = TrialEnded(trial, recorded, False, epochs)  # type: ignore[arg-type]
    started = RunStarted(tmp_path, plan, plan.groups, 0)
    output = shown(started, ended, force_terminal=terminal, verbose=True)
    assert "trained in 2.0 s" in output and "  epoch 2: training loss 1.5000, learning rate 0.1" in output
    output = shown(started, ended, force_terminal=terminal)
    assert ("trained in 2.0 s" in output) != terminal and "epoch 2" not in output
    assert "epoch 2" not in shown(ended, quiet=True)
    failed = ended._replace(line={**recorded, "outcome": "error", "reason": "ValueError on rank 0: bad"})
    assert "ValueError on rank 0: bad" in shown(started, failed, force_terminal=terminal)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"purpose": "profile", "kind": "diagnostic"}, "profiled in 2.0 s"),
        ({"purpose": "equivalence", "kind": "diagnostic"}, "checked in 2.0 s"),
        ({"purpose": "doctor", "kind": "diagnostic"}, "examined in 2.0 s"),
        ({"kind": "convergence"}, "trained in 2.0 s"),
        ({"kind": "convergence", "facts": {"training_samples": 1437}}, "trained on 1,437 samples in 2.0 s"),
        ({}, "100 samples/s"),
        ({"outcome": "oom"}, "because of oom"),
    ],
)
def test_a_trial_says_what_it_came_to(columns: dict[str, Any], text: str) -> None:
    assert trial_result({**line(**columns), "steps_s": 2.0}) == text  # type: ignore[arg-type]


GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
START_S = 4.0


class Run:
    """A run of a plan by a clock of its own; ``seconds``: the duration of each kind of trial."""

    def __init__(self, plan: Plan, seconds: Mapping[str, float]) -> None:
        self.now, self.seconds, self.plan = 100.0, seconds, plan
        self.left = TimeLeft(plan, plan.groups, lambda: self.now)

    def measure(self, trials: int, outcome: str = "ok") -> list[Trial]:
        """Measure the first trials; return the rest."""
        wanted = trials
        for group in self.plan.groups:
            if wanted == 0:
                break
            self.left.follow(GroupStarting(group))
            self.now += START_S
            self.left.follow(GroupReady(group, START_S))
            for trial in group.trials[:wanted]:
                self.left.follow(TrialStarting(trial))
                self.now += self.seconds[trial.scenario] * trial.cell.devices * (outcome != "skipped")
                self.left.follow(TrialEnded(trial, {"outcome": outcome}))
                wanted -= 1
        return list(self.plan.trials[trials:])


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    convergence = {"epochs": 1, "seeds": [0, 1]}
    return make_plan(make_experiment(GRID, throughput={"blocks": 3}, convergence=convergence), laptop())


SECONDS = {"throughput": 2.0, "convergence": 50.0}


def expected_s(trials: Iterable[Trial]) -> float:
    return sum(SECONDS[trial.scenario] * trial.cell.devices for trial in trials)


def first_block(plan: Plan) -> int:
    return sum(len(group.trials) for group in plan.groups if group.block == 0)


def test_trials_of_a_kind_and_cell_take_what_they_took_before_and_groups_that_never_start_nothing(plan: Plan) -> None:
    run = Run(plan, SECONDS)
    *left_out, last = run.measure(first_block(plan))
    groups = sum(group.block > 0 for group in plan.groups)
    assert run.left.seconds == pytest.approx(expected_s([*left_out, last]) + START_S * groups)
    assert run.left.text.startswith("about ")
    for trial in left_out:
        run.left.follow(TrialEnded(trial, {"outcome": "skipped"}))
    assert run.left.seconds == pytest.approx(START_S + expected_s([last]))


def test_before_any_trial_the_plan_says_the_least_and_a_lost_trial_is_still_to_be_measured(plan: Plan) -> None:
    left = TimeLeft(plan, plan.groups, lambda: 0.0)
    least = GROUP_START_S["ray"] * len(plan.groups) + sum(map(plan.least_trial_seconds, plan.trials))
    assert left.seconds == pytest.approx(least) and left.text == f"at least {rounded(least)} left"
    for again, less in ((True, 0.0), (False, plan.least_trial_seconds(plan.trials[0]))):
        left.follow(TrialEnded(plan.trials[0], {"outcome": "lost"}, again=again))
        assert left.seconds == pytest.approx(least - less)


def test_within_a_trial_the_time_goes_on_and_what_is_repeated_takes_its_time_again(plan: Plan) -> None:
    run = Run(plan, SECONDS)
    rest = run.measure(first_block(plan))
    group = next(group for group in plan.groups if group.block == 1)
    run.left.follow(GroupStarting(group))
    run.now += START_S
    run.left.follow(GroupReady(group, START_S))
    run.left.follow(TrialStarting(rest[0]))
    before = run.left.seconds
    run.now += 1.0
    assert run.left.seconds == pytest.approx(before - 1.0)
    run.now += 1000.0
    assert run.left.seconds == pytest.approx(before - expected_s(rest[:1]))
    run = Run(plan, SECONDS)
    run.measure(len(plan.trials))
    assert run.left.seconds == 0


def test_failed_and_skipped_trials_say_nothing_about_the_others(plan: Plan) -> None:
    for outcome in ("error", "skipped"):
        run = Run(plan, SECONDS)
        rest = run.measure(3, outcome)
        assert run.left.text.startswith("at least ")
        assert run.left.seconds < sum(map(plan.least_trial_seconds, rest)) + 12.0 * len(plan.groups)


def test_a_limit_ends_the_run_and_a_rule_may_need_fewer_blocks(make_experiment: Make) -> None:
    blocks = {"at_least": 2, "at_most": 9, "halfwidth": 0.1}
    run = Run(make_plan(make_experiment(GRID, throughput={"blocks": blocks}), laptop()), SECONDS)
    run.measure(first_block(run.plan))
    assert run.left.text.startswith("at most ")
    plan = make_plan(make_experiment(GRID, throughput={"blocks": 500}), laptop())
    now = [0.0]
    left = TimeLeft(plan, plan.groups, lambda: now[0], limit_s=300.0)
    assert left.seconds == 300.0
    now[0] = 100.0
    assert left.seconds == 200.0


def test_the_text_is_given_at_most_once_a_minute_and_not_at_the_end(plan: Plan) -> None:
    now = [0.0]
    left = TimeLeft(plan, plan.groups, lambda: now[0])
    said = []
    for now[0] in (0.0, 59.0, 60.0, 61.0):
        said.append(bool(left.once_a_minute()))
    assert said == [True, False, True, False]
    left.follow(Note("of no interest"))
    for trial in plan.trials:
        left.follow(TrialEnded(trial, {"outcome": "ok"}))
    assert left.text == ""


def test_estimates_are_rounded_up() -> None:
    texts = {0: "10 s", 41: "50 s", 90: "90 s", 91: "2 min", 3540: "59 min", 3541: "1 h 00 min", 4000: "1 h 10 min"}
    assert {seconds: rounded(seconds) for seconds in texts} == texts and rounded(90000) == "25 h 00 min"
