"""What the terminal shows of names and messages that others wrote: text, and nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.analysis import trials as trial_tables
from harness.analysis.ratios import noise, parity, scaling, versus
from harness.config.experiment import Experiment
from harness.plan.planner import make_plan
from harness.record.schema import EQUIVALENCE, FINDINGS
from harness.report.row import plural
from harness.report.sentence import Sentence
from harness.report.tables.text import Heading, Line, TextTable
from harness.report.verdict import NO_VERDICT, Verdict
from harness.run.console import ConsoleSink, rich_table, trial_result
from harness.run.events import GroupStarting, Note, Planned, Repeating, Reported, RunStarted, TrialEnded, TrialStarting
from harness.run.plan_text import plan_table
from tests.conftest import gpu_cluster, laptop
from tests.records import line, steps_of

Make = Callable[..., Experiment]
HOSTILE = "[/bold][red]x[/nope] \x1b[2J\x1b]0;owned\x07 \x9b31m \u202egpj \r0 ok [link=http://x]y"

HOSTILE_FINDING = {
    "strategy": "ddp",
    "label": HOSTILE,
    "check": HOSTILE,
    "severity": "error",
    **dict.fromkeys(("seen", "means", "advice"), HOSTILE),
}


@pytest.mark.parametrize("terminal", [False, True])
def test_names_and_messages_are_text(make_experiment: Make, tmp_path: Path, terminal: bool) -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": 8, "model": [HOSTILE, "b"]}
    plan = make_plan(make_experiment(grid, workload="own:Own", convergence={"epochs": 1}), laptop())
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system=None, width=4000, legacy_windows=False)
    lines = [
        line(cell, model=HOSTILE, options={"workload.note": cell}, strategy=strategy, rates=rates)
        for cell, strategy, rates in (("single", "single", (100.0,)), ("ddp2", "ddp", (80.0, 80.0)))
    ]
    trials = trial_tables.trials(lines, steps_of(lines))
    tables = {function.__name__: function(trials) for function in (scaling, noise, versus, parity)}
    tables |= {"trials": trials, "equivalence": EQUIVALENCE.frame([]), "findings": FINDINGS.frame([HOSTILE_FINDING])}
    trial = plan.groups[0].trials[0]
    said = Sentence("fastest", HOSTILE, HOSTILE, HOSTILE)
    with ConsoleSink(console) as sink:
        sink(Planned(plan))
        sink(RunStarted(tmp_path / HOSTILE.replace("/", "_"), plan, plan.groups, 0))
        sink(GroupStarting(plan.groups[0]))
        sink(TrialStarting(trial))
        sink(TrialEnded(trial, {**lines[0], "outcome": "error", "reason": HOSTILE}, False))
        sink(Note(HOSTILE))
        sink(Reported(tmp_path, tmp_path / "[red]report.html", tables, Verdict((said,)), 3.0))
    output = out.getvalue()
    assert "[/bold][red]x[/nope] \\x1b[2J\\x1b]0;owned\\x07 \\x9b31m \\u202egpj" in output
    assert "[red]report.html" in output
    for character in ("\x1b]0", "\x1b[2J\x1b]", "\x07", "\x9b", "\u202e", "\x1b[31m"):
        assert character not in output


def test_the_command_is_the_last_line_and_what_is_incomplete_the_verdicts_first(tmp_path: Path) -> None:
    out = io.StringIO()
    said = (
        Sentence("next", "", "It is small:", "python -m harness.run " + "a" * 90),
        Sentence("fastest", "ddp on 2 devices", "fast."),
        Sentence("incomplete", "3 cells have no result", "interrupted."),
    )
    tables = {"trials": trial_tables.trials([line()], steps_of([line()]))}
    with ConsoleSink(Console(file=out, width=80)) as sink:
        sink(Reported(tmp_path, tmp_path / "report.html", tables, Verdict(said), 3.0))
    lines = out.getvalue().splitlines()
    assert lines[-1] == said[0].command and lines[-2].rstrip() == "What to do next  It is small:"
    verdict = [line for line in lines if line.startswith(("INCOMPLETE", "What"))]
    assert [line.split("  ")[0] for line in verdict] == ["INCOMPLETE", "What to use", "What to do next"]


def test_findings_are_in_the_terminal_with_what_to_do(tmp_path: Path) -> None:
    out = io.StringIO()
    texts = {"seen": "64 of 256", "means": "samples are lost", "advice": "return all of them"}
    finding = {"strategy": "ddp", "label": "ddp x2", "check": "data sharding", "severity": "warning", **texts}
    with ConsoleSink(Console(file=out, width=4000)) as sink:
        sink(Reported(tmp_path, tmp_path / "r.html", {"findings": FINDINGS.frame([finding])}, NO_VERDICT, 3.0))
    for expected in ("warning data sharding: ddp x2", *texts.values()):
        assert expected in out.getvalue()


def test_an_error_in_a_table_of_the_terminal_costs_that_table(tmp_path: Path) -> None:
    out = io.StringIO()
    trials = trial_tables.trials([line()], steps_of([line()]))
    tables = {"trials": trials}  # the others raise
    with ConsoleSink(Console(file=out, width=4000)) as sink:
        sink(Reported(tmp_path, tmp_path / "report.html", tables, NO_VERDICT, 3.0))
    output = out.getvalue()
    assert (
        "the terminal's scaling table failed by an error of the harness: KeyError: 'scaling', in console.py" in output
    )
    assert "Trials: 1 ok." in output and "report.html\n" in output
    assert "KeyError" in (tmp_path / "logs" / "terminal.txt").read_text()


def test_no_heading_of_the_plan_is_folded_on_80_columns(make_experiment: Make) -> None:
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 16], "nodes": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, convergence={"epochs": 1}), gpu_cluster(2))
    out = io.StringIO()
    Console(file=out, width=80).print(plan_table(plan))
    lines = out.getvalue().splitlines()
    headings = next(line for line in lines if "strategy" in line).split()
    assert headings == ["strategy", "devices", "workers", "cells", "throughput", "convergence", "added"]
    assert max(map(len, lines)) <= 80 and any("16 on 2 nodes" in line for line in lines)


def test_the_start_of_a_worker_group_is_plain_text(make_experiment: Make) -> None:
    grid = {"strategy": ["dp", "ddp"], "devices": 2, "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop())
    out = io.StringIO()
    with ConsoleSink(Console(file=out, width=200)) as sink:
        for group in plan.groups:
            sink(GroupStarting(group))
    for expected in ("1 worker with 2 devices: 1 trial", "2 workers with 1 device each: 1 trial"):
        assert f"Starting {expected} of block 0" in out.getvalue()


def test_ratios_of_the_default_experiment_need_a_line_each_on_80_columns() -> None:
    columns = (
        Heading("first / second"),
        Heading("setting"),
        Heading("ratio (95 % interval)", True),
        Heading("n", True),
    )
    ratio = ("ddp x2 / dp (emulated) x2", "resnet14 · batch 64/device", "1.175 (0.920 to 1.500)", "3")
    out = io.StringIO()
    Console(file=out, width=80).print(rich_table(TextTable(columns, (Line(ratio),)), "Strategies"))
    assert [part in out.getvalue().splitlines()[-1] for part in ratio] == [True] * 4


def test_a_title_that_is_wider_than_its_table_stays_on_one_line(make_experiment: Make) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(rich_table(TextTable((Heading("n", True),), (Line(("3",)),)), "resnet34 · global batch 64"))
    plan = make_plan(make_experiment({"per_device_batch_size": 8}, name="a-name-of-twenty-chars"), laptop())
    console.print(plan_table(plan))
    lines = out.getvalue().splitlines()
    assert lines[0] == "resnet34 · global batch 64"
    assert f"Plan of {plan.experiment.name}: what the file asks for, and what is added" in lines


@pytest.mark.parametrize("terminal", [False, True])
def test_a_training_is_shown_epoch_by_epoch(make_experiment: Make, tmp_path: Path, terminal: bool) -> None:
    grid = {"strategy": "single", "devices": 1, "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, convergence={"epochs": 2}), laptop())
    trial = next(one for one in plan.trials if one.kind == "convergence")
    epochs = {"epoch": [1, 2], "train_loss": [2.0, 1.5], "learning_rate": [0.1, 0.1]}
    recorded = {**line(kind="convergence"), "steps_s": 2.0}
    out = io.StringIO()
    with ConsoleSink(Console(file=out, width=200, force_terminal=terminal, color_system=None)) as sink:
        sink(RunStarted(tmp_path, plan, plan.groups, 0))
        sink(TrialEnded(trial, recorded, False, epochs))  # type: ignore[arg-type]
    assert "  epoch 2: training loss 1.5000, learning rate 0.1" in out.getvalue()
    quiet = io.StringIO()
    with ConsoleSink(Console(file=quiet, width=200), quiet=True) as sink:
        sink(TrialEnded(trial, recorded, False, epochs))  # type: ignore[arg-type]
    assert "epoch" not in quiet.getvalue()


def test_what_is_repeated_is_counted(make_experiment: Make, tmp_path: Path) -> None:
    grid = {"strategy": "ddp", "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop())
    out = io.StringIO()
    with ConsoleSink(Console(file=out, width=200)) as sink:
        sink(RunStarted(tmp_path, plan, plan.groups, 0))
        count = len(plan.trials)
        for number, trial in enumerate((*plan.trials, *plan.groups[0].trials)):
            if number == count:
                sink(Repeating(plan.groups[:1]))
            sink(TrialEnded(trial, line(), False))
    again = len(plan.groups[0].trials)
    assert f"[{count}/{count}]" in out.getvalue() and f"[{count + again}/{count + again}]" in out.getvalue()
    assert f"{plural(again, 'trial')} once more, on one type of nodes: their hardware differed" in out.getvalue()


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
