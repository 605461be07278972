"""The verdict in sentences: each statement with its number and interval, and the commands that this run accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from harness.analysis.verdict import READ
from harness.config.experiment import parse_experiment
from harness.record.schema import DERIVED, TRIALS, VERDICT
from harness.report.sentence import MOST, TOPICS
from harness.report.sentences import PHRASES
from harness.report.tables.text import NO_BREAK
from harness.report.verdict import Verdict, make_verdict

CELL: dict[str, Any] = {
    "workload": "image_classification",
    "kind": "throughput",
    "data": "digits",
    "model": "resnet8",
    "strategy": "ddp",
    "device": "cuda",
    "devices": 8,
    "nodes": 1,
    "scaling": "weak",
    "per_device_batch_size": 32,
    "global_batch_size": 256,
    "precision": "fp32",
    "compile": False,
    "launcher": "ray",
    "emulated": False,
    "oversubscribed": False,
    "options": {},
    "outcome": "ok",
    "unit": "samples",
}
CELLS = {
    "a": {**CELL, "label": "ddp x8"},
    "b": {**CELL, "strategy": "fsdp", "label": "fsdp x8"},
    "base": {**CELL, "strategy": "single", "devices": 1, "global_batch_size": 32, "label": "single x1"},
}


def verdict_of(*statements: dict[str, Any], **given: Any) -> Verdict:
    """Return the verdict on these statements; ``given``: tables of the run, and settings of its file."""
    tables = {table.name: table.frame([]) for table in DERIVED}
    tables |= {name: READ[name].frame(rows) for name, rows in given.items() if name in READ}
    trials = [{**axes, "trial_id": name, "cell_id": name} for name, axes in CELLS.items()]
    grid = {"model": ["resnet8"], "strategy": ["ddp"], "devices": [8], "per_device_batch_size": [32]}
    content = {"name": "study", "grid": grid, **given.get("experiment", {})}
    results = SimpleNamespace(
        **{**tables, "trials": TRIALS.frame(given.get("trials", trials)), "verdict": VERDICT.frame(statements)},
        experiment=parse_experiment(content, source="test"),
        folder=SimpleNamespace(path=Path("results/study/1")),
    )
    return make_verdict(results)  # type: ignore[arg-type]


def text_of(statement: dict[str, Any], **given: Any) -> str:
    sentence = verdict_of(statement, **given).sentences[0]
    words = [f"{sentence.lead}:", sentence.text, sentence.proposal]
    return " ".join(word for word in words if word).replace(NO_BREAK, " ")


FASTEST = {"topic": "fastest", "code": "fastest", "cell_id": "a", "devices": 8, "value": 1000.0, "n": 5}
INTERVAL = {"low": 900.0, "high": 1100.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            INTERVAL,
            "ddp x8: 1,000 (900 to 1,100) samples/s over 5 blocks. "
            "Faster than the other settings on 8 devices at that batch.",
        ),
        ({"subject": "alone"}, "ddp x8: 1,000 samples/s over 5 blocks."),
        ({"others": ("b",)}, "ddp x8: 1,000 samples/s over 5 blocks. Cannot be told apart from it: fsdp x8."),
        ({"reasons": ("b",)}, "ddp x8: 1,000 samples/s over 5 blocks. Too few blocks to compare it with fsdp x8."),
        (
            {"code": "smallest batch", "others": ("b",)},
            "ddp x8: 1,000 samples/s over 5 blocks. "
            "The smallest batch with 95 % of the highest throughput on 8 devices. "
            "Cannot be told apart from it: fsdp x8.",
        ),
    ],
)
def test_what_to_use(change: dict[str, Any], expected: str) -> None:
    assert text_of({**FASTEST, **change}) == expected


def test_what_to_use_has_its_speedup() -> None:
    ratio = {**CELL, "cell_id": "a", "base_id": "base", "base_strategy": "single", "base_devices": 1}
    scaling = [{**ratio, "speedup": 7.0, "low": 6.5, "high": 7.5}]
    assert ", 7.00 (6.50 to 7.50) times single x1." in text_of(FASTEST, scaling=scaling)


def test_a_leading_cell_that_is_slower_than_one_device_is_said_to_be() -> None:
    ratio = {**CELL, "cell_id": "a", "base_id": "base", "base_strategy": "single", "base_devices": 1}
    text = text_of(FASTEST, scaling=[{**ratio, "speedup": 0.7, "low": 0.68, "high": 0.72}])
    assert ", slower: 0.70 (0.68 to 0.72) times single x1." in text


def test_a_speedup_that_may_be_none_is_no_clear_difference() -> None:
    ratio = {**CELL, "cell_id": "a", "base_id": "base", "base_strategy": "single", "base_devices": 1}
    for ends in ({"low": 0.95, "high": 1.58}, {}):
        text = text_of(FASTEST, scaling=[{**ratio, "speedup": 1.2, **ends}])
        assert "times single x1 (no clear difference)." in text


CHOICE = {"topic": "choice", "code": "faster", "cell_id": "a", "others": ("b",), "value": 1.2, "n": 5}


@pytest.mark.parametrize(
    ("code", "expected"), [("slower", "the first is slower"), ("no clear difference", "no clear difference")]
)
def test_options_are_compared_by_name(code: str, expected: str) -> None:
    statement = {**CHOICE, "code": code, "low": 1.1, "high": 1.3, "subject": "ddp.bucket_cap_mb 25 / 1"}
    said = f"1.20 (1.10 to 1.30) times the throughput over 5 blocks: {expected}."
    assert text_of(statement) == f"ddp.bucket_cap_mb 25 / 1: {said}"
    labels = {"label": "ddp x8 · bucket_cap_mb=25", "other_label": "ddp x8 · bucket_cap_mb=1"}
    versus = [{**CELL, **labels, "cell_id": "a", "other_id": "b", "axis": "ddp.bucket_cap_mb"}]
    assert text_of(statement, versus=versus) == f"ddp x8 · bucket_cap_mb=25 / 1: {said}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"code": "above"}, "efficiency 70 % (60 to 80 %), above 80 % on every number of devices measured."),
        ({"code": "below"}, "efficiency 70 % (60 to 80 %) on 8 devices, below 80 %."),
        (
            {"code": "below", "subject": "4"},
            "above 80 % efficiency up to 4 devices; efficiency 70 % (60 to 80 %) on 8 devices, below 80 %.",
        ),
        ({"code": "not clear"}, "efficiency 70 % (60 to 80 %) on 8 devices: whether above 80 % is not clear."),
    ],
)
def test_how_far_it_scales(change: dict[str, Any], expected: str) -> None:
    statement = {"topic": "scaling", "cell_id": "a", "devices": 8, "value": 0.7, "low": 0.6, "high": 0.8}
    assert text_of({**statement, **change}) == f"ddp x8: {expected}"


LOSS = {"topic": "loss", "code": "largest", "cell_id": "a", "value": 0.2, "low": 0.1, "high": 0.3}


def test_why_not_better_proposes_options_and_a_file_that_runs() -> None:
    verdict = verdict_of({**LOSS, "subject": "exposed communication"})
    loss, proposed = verdict.sentences
    assert (
        loss.text.replace(NO_BREAK, " ")
        == "exposed communication takes 20 % (10 to 30 %) of the step, the largest loss whose interval excludes 0."
    )
    assert loss.proposal.startswith("Try ddp.bucket_cap_mb: [1, 25, 100]; ")
    assert proposed.command == "python -m harness.run results/study/1/next.yaml"
    assert (proposed.lead, proposed.text) == ("ddp.bucket_cap_mb: [1, 25, 100]", "for ddp x8, all else as here:")
    content = yaml.safe_load(verdict.next_file)
    assert content["grid"]["ddp.bucket_cap_mb"] == [1, 25, 100] and parse_experiment(content, source="next")


def test_a_workload_of_your_own_is_found_beside_your_file() -> None:
    own = {"experiment": {"workload": "mine:Own"}}
    *_, proposed = verdict_of({**LOSS, "subject": "exposed communication"}, **own).sentences
    assert proposed.command == "" and "beside your experiment file, and run it" in proposed.text


def test_what_no_option_changes_says_so_and_proposes_nothing() -> None:
    verdict = verdict_of({**LOSS, "subject": "side by side"})
    assert "no option changes that" in verdict.sentences[0].text
    assert not verdict.proposes and verdict.commands == []


def test_an_uncertain_loss_proposes_nothing() -> None:
    verdict = verdict_of({**LOSS, "code": "none is certain", "subject": "wrapper"})
    assert "no part of the loss has an interval that excludes 0; the largest is wrapper" in verdict.sentences[0].text
    assert not verdict.proposes


def test_options_are_proposed_once() -> None:
    first, second, _ = verdict_of(*[{**LOSS, "subject": "exposed communication"}] * 2).sentences
    assert first.proposal and not second.proposal


def test_the_file_tries_what_costs_most() -> None:
    data = {"topic": "data", "code": "waits", "cell_id": "a", "value": 0.6}
    verdict = verdict_of({**LOSS, "subject": "exposed communication"}, data)
    assert "loader.workers" in verdict.next_file


TRUST = {"topic": "trust", "code": "low", "cell_id": "a", "value": 0.23, "n": 4, "subject": "fixed"}


def test_how_sure_names_reasons_and_the_command_that_adds_blocks() -> None:
    (sentence,) = verdict_of({**TRUST, "reasons": ("noise", "doubt: wide spread")}).sentences
    assert sentence.lead == "Low" and sentence.is_bad
    assert sentence.text.startswith("the A/A test differs by up to 23 %; doubts about the settings")
    assert "base: wide spread. Intervals within 5 % need about 4 more blocks" in sentence.text
    assert sentence.command == "python -m harness.run --resume results/study/1 --add-blocks 4"


def test_trust_that_differs_names_its_settings() -> None:
    low = {**TRUST, "reasons": ("doubt: wide spread",)}
    high = {**TRUST, "code": "high", "cell_id": "b", "others": ("base",), "value": 0.03, "n": 0}
    first, second = verdict_of(low, high).sentences
    assert first.lead == "Low for ddp x8" and "doubts about it or its base: wide spread" in first.text
    assert second.lead == "High for fsdp x8, single x1" and not second.command


def test_a_rule_for_blocks_takes_a_new_run() -> None:
    rule = {"throughput": {"blocks": {"at_least": 3, "at_most": 6, "halfwidth": 0.05}}}
    (sentence,) = verdict_of({**TRUST, "subject": "rule", "reasons": ("blocks",)}, experiment=rule).sentences
    assert sentence.command == "" and sentence.proposal == "throughput.blocks.at_most: 10"


def test_hundreds_of_blocks_are_not_proposed() -> None:
    (sentence,) = verdict_of({**TRUST, "n": 857, "reasons": ("noise",)}).sentences
    assert sentence.command == "" and "More blocks alone will not help (857 for" in sentence.text


def test_high_trust_needs_no_more_blocks() -> None:
    (sentence,) = verdict_of({**TRUST, "code": "high", "value": 0.03, "n": 0}).sentences
    assert (sentence.lead, sentence.text) == ("High", "A/A test within 3 %, no doubts.")
    assert not sentence.is_bad and not sentence.command


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            {"topic": "equivalence", "code": "equivalent", "value": 1e-6, "n": 3},
            "Every strategy: trains as one device does (3 checks, updates differ by at most 0.0001 %).",
        ),
        (
            {"topic": "equivalence", "code": "not equivalent", "cell_id": "b", "subject": "not equivalent: differs"},
            "fsdp x8: not equivalent: differs; its cells have no ratios.",
        ),
        (
            {"topic": "equivalence", "code": "unknown", "cell_id": "b", "subject": "unknown: it was not run"},
            "fsdp x8: whether it trains as one device does is unknown: it was not run.",
        ),
        (
            {"topic": "failed", "code": "trials", "cell_id": "a", "subject": "oom", "n": 2, "reasons": ("full",)},
            "oom: 2 trials of ddp x8: full.",
        ),
        (
            {"topic": "failed", "code": "preflight", "subject": "loader", "n": 1, "reasons": ("slow",)},
            "Preflight, loader: slow.",
        ),
        (
            {"topic": "failed", "code": "tables", "n": 1, "reasons": ("noise",), "evidence": ""},
            "Table noise: failed by an error of the harness; the sentences that need it are left out.",
        ),
        (
            {"topic": "open", "code": "too_few_devices", "n": 2, "subject": "16, 32"},
            "2 cells on 16, 32 devices: this machine has too few; the same file runs on a larger one.",
        ),
        (
            {"topic": "open", "code": "out_of_memory", "n": 2, "subject": "8", "reasons": ("batch 64 is too large",)},
            "2 cells: batch 64 is too large.",
        ),
        (
            {"topic": "fewer", "code": "fastest", "cell_id": "a", "value": 500.0, "others": ("b",)},
            "ddp x8: 500 samples/s. Cannot be told apart from it: fsdp x8.",
        ),
        (
            {"topic": "failed", "code": "preflight", "cell_id": "no trial", "subject": "loader", "reasons": ("slow",)},
            "Preflight, loader: slow.",
        ),
        (
            {"topic": "data", "code": "waits", "cell_id": "a", "value": 0.6},
            "ddp x8: waits for data 60 % of its step. Try loader.workers: [0, 2, 4].",
        ),
        (
            {"topic": "training", "code": "reached", "cell_id": "a", "subject": "acc >= 0.9", "value": 5.0, "n": 1},
            "ddp x8: shortest median time to acc >= 0.9: 5 s.",
        ),
        (
            {"topic": "training", "code": "missed", "cell_id": "a", "subject": "acc >= 0.9", "n": 1},
            "ddp x8: no training reached acc >= 0.9 with every seed.",
        ),
    ],
)
def test_other_statements(statement: Mapping[str, Any], expected: str) -> None:
    assert text_of(dict(statement)) == expected


def test_what_is_missing_has_the_command_that_measures_it() -> None:
    (sentence,) = verdict_of({"topic": "open", "code": "missing", "n": 3}).sentences
    assert (sentence.lead, sentence.command) == ("3 planned trials", "python -m harness.run --resume results/study/1")


def test_many_statements_are_cut_and_counted() -> None:
    found = verdict_of(*[FASTEST] * (MOST + 3)).sentences
    assert len(found) == MOST + 1 and found[-1].text == "And 3 more, in tables/verdict.csv."


def test_nothing_measured_comes_as_a_failure() -> None:
    found = verdict_of(trials=[{**CELL, "trial_id": "a", "cell_id": "a", "outcome": "oom"}]).sentences
    assert [sentence.lead for sentence in found] == ["Nothing was measured"]


def test_rehearsals_alone_make_no_claim() -> None:
    found = verdict_of(cells=[{**CELL, "cell_id": "a", "emulated": True}]).sentences
    assert [sentence.lead for sentence in found] == ["No claim about speed"]


def test_every_topic_has_a_phrase_and_a_heading() -> None:
    assert set(PHRASES) | {"next"} == set(TOPICS)
