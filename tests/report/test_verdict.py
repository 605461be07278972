"""The verdict in sentences: each statement with its number and interval, in words that need no key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.analysis.doubts import DOUBTS
from harness.analysis.verdict import READ
from harness.config.experiment import parse_experiment
from harness.plan.labels import TAGS
from harness.record.schema import DERIVED, TRIALS, VERDICT
from harness.report.sentence import MOST, TOPICS, Sentence
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
    known = {**{table.name: table for table in DERIVED}, **READ}
    tables |= {name: known[name].frame(rows) for name, rows in given.items() if name in known}
    trials = [{**axes, "trial_id": name, "cell_id": name} for name, axes in CELLS.items()]
    grid = {"model": ["resnet8"], "strategy": ["ddp"], "devices": [8], "per_device_batch_size": [32]}
    content = {"name": "study", "grid": grid, **given.get("experiment", {})}
    results = SimpleNamespace(
        **{**tables, "trials": TRIALS.frame(given.get("trials", trials)), "verdict": VERDICT.frame(statements)},
        experiment=parse_experiment(content, source="test"),
        folder=SimpleNamespace(path=given.get("folder", Path("results/study/1"))),
        environment=given.get("environment", {}),
        lines=given.get("lines", []),
    )
    return make_verdict(results)  # type: ignore[arg-type]


def sentences_on(topic: str, *statements: dict[str, Any], **given: Any) -> list[Sentence]:
    """Return the sentences of one topic of the verdict on these statements."""
    return [one for one in verdict_of(*statements, **given).sentences if one.topic == topic]


def text_of(statement: dict[str, Any], **given: Any) -> str:
    sentence = verdict_of(statement, **given).sentences[0]
    return f"{sentence.lead}: {sentence.text}".replace(NO_BREAK, " ")


FASTEST = {"topic": "fastest", "code": "fastest", "cell_id": "a", "devices": 8, "value": 1000.0, "n": 5}


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


BASE = "1 device (strategy single, same batch per device)"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"code": "above"},
            f"efficiency 70 % (60 to 80 %) on 8 devices, compared with {BASE}: above the threshold of 80 %, as on "
            "every number of devices measured.",
        ),
        (
            {"code": "below", "subject": "4"},
            "above the threshold of 80 % up to 4 devices; efficiency 70 % (60 to 80 %) on 8 devices, compared with "
            f"{BASE}: below the threshold of 80 %.",
        ),
        (
            {"code": "not clear"},
            f"efficiency 70 % (60 to 80 %) on 8 devices, compared with {BASE}: whether above the threshold of 80 % is "
            "not clear.",
        ),
    ],
)
def test_how_far_it_scales(change: dict[str, Any], expected: str) -> None:
    statement = {"topic": "scaling", "cell_id": "a", "devices": 8, "value": 0.7, "low": 0.6, "high": 0.8}
    ratio = {**CELL, "cell_id": "a", "base_id": "base", "base_strategy": "single", "base_devices": 1, "speedup": 5.6}
    assert text_of({**statement, **change}, scaling=[ratio]) == f"ddp on 8 devices · batch 32/device: {expected}"


def test_only_several_leading_settings_are_named_again_and_by_what_differs() -> None:
    scaling = {"topic": "scaling", "code": "above", "value": 0.9, "devices": 8}
    (alone,) = sentences_on("scaling", FASTEST, {**scaling, "cell_id": "a"})
    first, second = sentences_on(
        "scaling",
        FASTEST,
        {**FASTEST, "cell_id": "b"},
        *({**scaling, "cell_id": cell_id} for cell_id in ("a", "b")),
    )
    assert alone.lead == "" and (first.lead, second.lead) == ("ddp on 8 devices", "fsdp on 8 devices")


TRUST = {"topic": "trust", "code": "low", "cell_id": "a", "value": 0.23, "n": 4, "subject": "fixed"}


def test_how_sure_names_reasons_in_plain_words_and_the_blocks_that_would_help() -> None:
    (sentence,) = sentences_on("trust", {**TRUST, "reasons": ("noise", "doubt: wide spread")})
    assert sentence.lead == "Low" and sentence.is_bad and not sentence.command
    assert sentence.text == (
        "one setting measured twice may differ from itself by up to 23 % (A/A test); the times of single steps vary "
        "widely. Intervals within 5 % need about 4 more blocks."
    )


@pytest.mark.parametrize(("seconds", "words"), [(9, "36 s"), (800, "53 min"), (1000, "1 h 06 min")])
def test_more_blocks_have_their_wall_time(seconds: float, words: str) -> None:
    trials = [
        {**CELL, "trial_id": f"a{block}", "cell_id": "a", "block": block, "group_id": f"b{block}"} for block in range(2)
    ]
    ledger = [{"level": "group", "group_id": f"b{block}", "seconds": seconds} for block in range(2)]
    (sentence,) = sentences_on("trust", {**TRUST, "reasons": ("noise",)}, trials=trials, ledger=ledger)
    assert sentence.text.endswith(f"need about 4 more blocks (about {words}).")


@pytest.mark.parametrize("doubt", DOUBTS)
def test_every_doubt_has_plain_words(doubt: str) -> None:
    name = f"{doubt} 3" if doubt == "slow rank" else doubt
    (sentence,) = sentences_on("trust", {**TRUST, "n": 0, "reasons": (f"doubt: {name}",)})
    assert sentence.text == f"{DOUBTS[doubt].words}."


def test_trust_that_differs_names_its_settings() -> None:
    low = {**TRUST, "reasons": ("doubt: wide spread",)}
    high = {**TRUST, "code": "high", "cell_id": "b", "others": ("base",), "value": 0.03, "n": 0}
    first, second = sentences_on("trust", low, high)
    assert first.lead == "Low for ddp on 8 devices · batch 32/device"
    assert second.lead == "High for fsdp on 8 devices · batch 32/device, single on 1 device · batch 32"


@pytest.mark.parametrize(
    ("blocks", "end"),
    [
        (1, "One block does not show the spread: 4 more blocks do."),
        (2, "Intervals within 5 % need about 4 more blocks."),
    ],
)
def test_nothing_is_said_of_the_width_of_intervals_from_one_block(blocks: int, end: str) -> None:
    trials = [{"cell_id": "a", "kind": "throughput", "outcome": "ok", "block": block} for block in range(blocks)]
    (sentence,) = sentences_on("trust", {**TRUST, "reasons": ("blocks",)}, trials=trials)
    assert sentence.text.endswith(end)


def test_hundreds_of_blocks_are_not_proposed() -> None:
    (sentence,) = sentences_on("trust", {**TRUST, "n": 39255, "reasons": ("noise",)})
    assert "More blocks alone will not help (39,255 for" in sentence.text


def test_high_trust_needs_no_more_blocks() -> None:
    (sentence,) = sentences_on("trust", {**TRUST, "code": "high", "value": 0.03, "n": 0})
    assert sentence.lead == "High" and not sentence.is_bad
    assert sentence.text == "one setting measured twice differs by at most 3 % (A/A test), no doubts."


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            {"topic": "equivalence", "code": "equivalent", "value": 1e-6, "n": 3},
            "Every strategy trains as one device does: 3 checks, updates differ by at most 0.0001 %.",
        ),
        (
            {"topic": "equivalence", "code": "equivalent", "value": 1.1e-7, "n": 2},
            "Every strategy trains as one device does: 2 checks, updates differ by at most 0.0001 %.",
        ),
        (
            {"topic": "equivalence", "code": "equivalent", "value": 0.0, "n": 2},
            "Every strategy trains as one device does: 2 checks, updates differ by at most 0 %.",
        ),
        (
            {"topic": "equivalence", "code": "not equivalent", "cell_id": "b", "subject": "not equivalent: differs"},
            "fsdp on 8 devices · batch 32/device: not equivalent: differs; its ratios are no claims.",
        ),
        (
            {"topic": "equivalence", "code": "unknown", "cell_id": "b", "subject": "unknown: it was not run"},
            "fsdp on 8 devices · batch 32/device: whether it trains as one device does is unknown: it was not run.",
        ),
        (
            {"topic": "failed", "code": "trials", "cell_id": "a", "subject": "oom", "n": 2, "reasons": ("full",)},
            "2 trials ran out of memory: full (ddp on 8 devices · batch 32/device).",
        ),
        (
            {"topic": "failed", "code": "preflight", "subject": "loader", "n": 1, "reasons": ("slow",)},
            "Check before the measurement (loader): slow.",
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
            {"topic": "failed", "code": "preflight", "cell_id": "no trial", "subject": "loader", "reasons": ("slow",)},
            "Check before the measurement (loader): slow.",
        ),
        (
            {"topic": "training", "code": "reached", "cell_id": "a", "subject": "acc >= 0.9", "value": 5.0, "n": 1},
            "ddp on 8 devices · batch 32/device: shortest median time to acc >= 0.9: 5 s.",
        ),
        (
            {"topic": "training", "code": "missed", "cell_id": "a", "subject": "acc >= 0.9", "n": 1},
            "Global batch 256: no training reached acc >= 0.9 with every seed.",
        ),
    ],
)
def test_other_statements(statement: Mapping[str, Any], expected: str) -> None:
    assert text_of(dict(statement)) == expected


@pytest.mark.parametrize(
    ("invocations", "why"),
    [
        ([{"ended": "interrupted"}], "the run was interrupted"),
        ([{"ended": "finished"}], "the last call left them out (--only, or another machine)"),
        ([{}], "the run was killed, or is still going on"),
        ([], "the run was killed, or is still going on"),
    ],
)
def test_what_has_no_result_stands_first(invocations: list[dict[str, str]], why: str) -> None:
    missing = {"topic": "incomplete", "code": "missing", "n": 34}
    verdict = verdict_of(FASTEST, missing, environment={"invocations": invocations})
    (heading, (sentence,)), *_ = verdict.by_heading.items()
    assert heading == "INCOMPLETE" and sentence.is_bad
    assert sentence.lead == "34 of 37 planned trials (one cell in one block each) have no result"
    assert sentence.text == f"{why}. What follows rests on the others."


def test_cells_that_the_time_limit_cut_short_lack_trials_and_may_have_results() -> None:
    late = {"topic": "incomplete", "code": "time_up", "reasons": ("time is up",), "n": 1}
    (sentence,) = sentences_on("incomplete", late)
    assert (sentence.lead.partition(" (")[0], sentence.text) == ("1 cell lacks trials", "time is up.")


def test_cells_that_failed_are_named_first() -> None:
    failed = {"topic": "incomplete", "code": "failed", "cell_id": "a", "others": ("b",), "n": 2}
    (sentence,) = sentences_on("incomplete", failed)
    assert sentence.lead == "2 cells have no result"
    assert sentence.text == (
        "no trial succeeded (ddp on 8 devices · batch 32/device, fsdp on 8 devices · batch 32/device)."
    )


def test_a_complete_run_says_nothing_of_it() -> None:
    assert "INCOMPLETE" not in verdict_of(FASTEST).by_heading


def test_many_statements_are_cut_and_counted() -> None:
    found = sentences_on("fastest", *[FASTEST] * (MOST + 3))
    assert len(found) == MOST + 1 and found[-1].text == "And 3 more, in tables/verdict.csv."


def test_nothing_measured_comes_as_a_failure() -> None:
    found = sentences_on("failed", trials=[{**CELL, "trial_id": "a", "cell_id": "a", "outcome": "oom"}])
    assert [sentence.lead for sentence in found] == ["Nothing was measured"]


def test_rehearsals_alone_make_no_claim() -> None:
    (sentence,) = sentences_on("fastest", cells=[{**CELL, "cell_id": "a", "emulated": True}])
    assert sentence.lead == "No claim about speed"
    assert all(tag in sentence.text for tag in TAGS)


def test_what_is_left_out_of_the_claims_is_named() -> None:
    cells = [{**CELL, "cell_id": "a", "strategy": "dp", "emulated": True}, {**CELL, "cell_id": "b"}]
    (sentence,) = sentences_on("open", cells=cells, leaders=[{**CELL, "cell_id": "b"}])
    assert sentence.lead == "Left out of these claims" and sentence.text.startswith("dp (emulated); ")
    assert sentences_on("open", cells=cells[1:], leaders=[{**CELL, "cell_id": "b"}]) == []


def test_every_topic_has_a_phrase_and_a_heading() -> None:
    assert set(PHRASES) | {"next"} == set(TOPICS)
