"""The verdict in sentences: each statement with its number and interval, in words that need no key."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from harness.analysis.common import Row
from harness.analysis.doubts import DOUBTS, CountedDoubt
from harness.analysis.verdict import NUMBERS, Statement
from harness.config.load import parse_experiment
from harness.plan.labels import TAGS
from harness.record.schema import DERIVED, TRIALS
from harness.report.sentence import MOST, Sentence
from harness.report.tables.text import NO_BREAK
from harness.report.verdict import Verdict, make_verdict
from tests.analysis.verdict.test_rules import AXES

MADE = {"kind": "throughput", "outcome": "ok", "unit": "samples", "compile": False, "launcher": "ray"}
CELL: dict[str, Any] = {**AXES, **MADE}
DDP, FSDP = ("ddp on 8 devices · batch 32/device", "fsdp on 8 devices · batch 32/device")
CELLS = {
    "a": {**CELL, "label": "ddp x8"},
    "b": {**CELL, "strategy": "fsdp", "label": "fsdp x8"},
    "base": {**CELL, "strategy": "single", "devices": 1, "global_batch_size": 32, "label": "single x1"},
}


@cache
def empty_tables() -> dict[str, pd.DataFrame]:
    return {table.name: table.frame([]) for table in DERIVED}


def stated(topic: str, *, code: str = "", evidence: str = "", value: Any = None, **columns: Any) -> Statement:
    """Return the statement with these columns of the table VERDICT; the others are facts of their names."""
    own = {name: columns.pop(name) for name in [*columns] if name in Statement.__dataclass_fields__}
    numbers = (value, columns.pop("low", None), columns.pop("high", None))
    facts = {**columns, **dict(zip(NUMBERS.get(topic, ()), numbers, strict=False))}
    return Statement(topic, code, evidence, facts=Row(facts), **own)


def verdict_of(*statements: dict[str, Any], **given: Any) -> Verdict:
    """Return the verdict on these statements; ``given``: tables of the run, and settings of its file."""
    known = {table.name: table for table in DERIVED}
    tables = empty_tables() | {name: known[name].frame(rows) for name, rows in given.items() if name in known}
    trials = [{**axes, "trial_id": name, "cell_id": name} for name, axes in CELLS.items()]
    grid = {"model": ["resnet8"], "strategy": ["ddp"], "devices": [8], "per_device_batch_size": [32]}
    content = {"name": "study", "grid": grid, **given.get("experiment", {})}
    results = SimpleNamespace(
        **{
            **tables,
            "trials": TRIALS.frame(given.get("trials", trials)),
            "statements": [stated(**one) for one in statements],
        },
        experiment=parse_experiment(content, source="test"),
        folder=SimpleNamespace(path=given.get("folder", Path("results/study/1"))),
        environment=given.get("environment", {}),
        lines=given.get("lines", []),
        significance=0.025,
    )
    return make_verdict(results)  # type: ignore[arg-type]


def sentences_on(topic: str, *statements: dict[str, Any], **given: Any) -> list[Sentence]:
    """Return the sentences of one topic of the verdict on these statements."""
    return [one for one in verdict_of(*statements, **given).sentences if one.topic == topic]


def text_of(statement: dict[str, Any], **given: Any) -> str:
    sentence = verdict_of(statement, **given).sentences[0]
    return f"{sentence.lead}: {sentence.text}".replace(NO_BREAK, " ")


FASTEST = {"topic": "fastest", "code": "fastest", "cell_id": "a", "devices": 8, "value": 1000.0, "n": 5}
LABELS = {"label": "ddp x8 · bucket_cap_mb=25", "other_label": "ddp x8 · bucket_cap_mb=1"}
CHOICE = {"topic": "choice", "code": "faster", "cell_id": "a", "others": ("b",), "value": 1.2, "n": 5, **LABELS}


@pytest.mark.parametrize(
    ("code", "p_value", "expected"),
    [
        ("slower", 0.01, "the first is slower, clear"),
        ("leaning", 0.12, "leaning to the first (p = 0.12)"),
        ("open", 0.5, "open (p = 0.5)"),
        ("too few blocks to say", None, "too few blocks to say"),
    ],
)
def test_options_are_compared_by_name(code: str, p_value: float | None, expected: str) -> None:
    statement = {**CHOICE, "code": code, "low": 1.1, "high": 1.3, "p_adjusted": p_value}
    said = f"1.20 (1.10 to 1.30) times the throughput over 5 blocks: {expected}."
    assert text_of(statement) == f"ddp x8 · bucket_cap_mb=25 / 1: {said}"


BASE = "1 device"


def test_how_far_it_scales() -> None:
    base = {"base_strategy": "single", "base_devices": 1, "scaling": "weak"}
    statement = {"topic": "scaling", "cell_id": "a", "value": 0.7, "low": 0.6, "high": 0.8, **base}
    assert text_of(statement) == f"{DDP}: efficiency 70 % (60 to 80 %), compared with {BASE}."


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("no bottleneck", "the ingest is not the bottleneck"),
        ("bottleneck", "the ingest is the bottleneck"),
        ("open", "whether the ingest is the bottleneck is open"),
        ("no interval", "no interval below 3 blocks"),
    ],
)
def test_the_ingest_of_a_loop_stands_beside_its_training_and_in_the_decision(code: str, said: str) -> None:
    speeds = {"throughput_per_s": 500.0, "other_throughput_per_s": 2000.0}
    statement = {"topic": "ingest", "code": code, "cell_id": "a", "value": 0.25, "low": 0.2, "high": 0.3, **speeds}
    rates = "the ingest alone reaches 2,000 samples/s, training uses 500, 25 % (20 to 30 %)"
    assert text_of(statement) == f"{DDP}: {rates}: {said}."
    assert [one.text.replace(NO_BREAK, " ") for one in verdict_of(statement).lines["WHY"]] == [f"{rates}: {said}."]


def test_only_several_leading_settings_are_named_again_and_by_what_differs() -> None:
    loss = {"topic": "loss", "code": "clear", "value": 0.2, "low": 0.1, "high": 0.3, "devices": 8, "subject": "rest"}
    (alone,) = sentences_on("loss", FASTEST, {**loss, "cell_id": "a"})
    both = ({**loss, "cell_id": cell_id} for cell_id in ("a", "b"))
    first, second = sentences_on("loss", FASTEST, {**FASTEST, "cell_id": "b"}, *both)
    assert alone.lead == "" and (first.lead, second.lead) == ("ddp on 8 devices", "fsdp on 8 devices")


TRUST = {"topic": "trust", "code": "low", "cell_id": "a", "n": 4, "subject": "fixed"}
ADDED = "the ratio to the base is another in the blocks of later calls"
AGREES = "one setting measured twice agrees with itself (A/A test); no sign of a repeated error"
DIFFERS = "one setting measured twice differs from itself (A/A test; by chance 1 run in 20 does)"


@pytest.mark.parametrize(
    ("change", "lead", "words"),
    [
        ({"reasons": ("differs", "doubt: memory swapped")}, "Low", f"{DIFFERS}; memory was swapped to disk."),
        ({"reasons": ("blocks",), "code": "medium"}, "Medium", "few blocks, 5 are better."),
        ({"reasons": ("invocations: 1.43, then 0.98",)}, "Low", f"{ADDED} (1.43, then 0.98)."),
        ({"code": "high"}, "High", f"{AGREES}."),
    ],
)
def test_how_sure_names_reasons_in_plain_words(change: dict[str, Any], lead: str, words: str) -> None:
    (sentence,) = sentences_on("trust", {**TRUST, **change})
    assert (sentence.lead, sentence.is_bad, sentence.command, sentence.text) == (lead, lead == "Low", "", words)


def test_a_high_trust_has_the_interval_of_the_test_of_its_base() -> None:
    noise = [{"cell_id": cell_id, "low": low, "high": 1.04} for cell_id, low in (("base", 0.97), ("c", 0.5))]
    noise.append({"cell_id": "base", "low": None, "high": None})
    for scaling, cell_id in (([RATIO], "a"), ([], "base")):
        said = {**TRUST, "code": "high", "cell_id": cell_id}
        (sentence,) = sentences_on("trust", said, noise=noise, scaling=scaling)
        assert sentence.text == f"{AGREES.replace('test', 'test: 0.97 to 1.04')}."
    (both,) = sentences_on("trust", {**TRUST, "code": "high", "others": ("c",)}, noise=noise, scaling=[RATIO])
    each = AGREES.replace("one setting", "each of 2 settings").replace("test", "test: 0.97 to 1.04, 0.50 to 1.04")
    assert both.text == f"{each}."
    chance = [{**noise[0], "low": 1.01, "excludes_one": True}, {**noise[1], "excludes_one": False}]
    (sentence,) = sentences_on("trust", {**TRUST, "code": "high"}, noise=chance, scaling=[RATIO])
    assert "(A/A test: 1.01 to 1.04; of 2 tests one may exclude 1 by chance)" in sentence.text


@pytest.mark.parametrize(("seconds", "words"), [(9, "36 s"), (800, "53 min"), (1000, "1 h 06 min")])
def test_more_blocks_have_their_wall_time(seconds: float, words: str) -> None:
    trials = [{**CELL, "trial_id": f"a{n}", "cell_id": "a", "block": n, "group_id": f"b{n}"} for n in range(2)]
    ledger = [{"level": "group", "group_id": f"b{block}", "seconds": seconds} for block in range(2)]
    (sentence,) = sentences_on("next", {**TRUST, "reasons": ("blocks",)}, trials=trials, ledger=ledger)
    assert sentence.text == f"About 4 more blocks (about {words}) decide what is open:"


@pytest.mark.parametrize("doubt", DOUBTS)
def test_every_doubt_has_plain_words(doubt: str) -> None:
    name = f"{doubt} 3" if doubt == "slow rank" else doubt
    (sentence,) = sentences_on("trust", {**TRUST, "n": 0, "reasons": (f"doubt: {name}",)})
    assert sentence.text == f"{DOUBTS[doubt].words}."


def test_trust_that_differs_names_its_settings() -> None:
    low = {**TRUST, "reasons": ("doubt: wide spread",)}
    high = {**TRUST, "code": "high", "cell_id": "b", "others": ("base",), "n": 0}
    leads = [sentence.lead for sentence in sentences_on("trust", low, high)]
    assert leads == [f"Low for {DDP}", f"High for {FSDP}, single on 1 device · batch 32"]


SAME = "Every strategy trains as one device does: "
BROKEN = "Table noise: failed by an error of the harness; the sentences that need it are left out."
FULL = {"subject": "oom", "n": 2, "reasons": ("full",)}
SLOW = {"subject": "loader", "n": 1, "reasons": ("slow",)}
TARGET = {"cell_id": "a", "subject": "acc >= 0.9", "n": 1}
OPEN = "this machine has too few; the same file runs on a larger one."
NO_RUN = {"cell_id": "b", "subject": "unknown: it was not run"}


@pytest.mark.parametrize(
    ("topic", "code", "columns", "expected"),
    [
        ("equivalence", "equivalent", {"value": 1e-6, "n": 3}, f"{SAME}3 checks, updates differ by at most 0.0001 %."),
        ("equivalence", "equivalent", {"value": 1e-7, "n": 2}, f"{SAME}2 checks, updates differ by at most 0.0001 %."),
        ("equivalence", "equivalent", {"value": 0.0, "n": 2}, f"{SAME}2 checks, updates differ by at most 0 %."),
        ("equivalence", "not equivalent", {"cell_id": "b", "subject": "x"}, f"{FSDP}: x; its ratios are no claims."),
        ("equivalence", "unknown", NO_RUN, f"{FSDP}: whether it trains as one device does is {NO_RUN['subject']}."),
        ("failed", "trials", {**FULL, "cell_id": "a"}, f"2 trials ran out of memory: full ({DDP})."),
        ("failed", "preflight", SLOW, "Check before the measurement (loader): slow."),
        ("failed", "preflight", {**SLOW, "cell_id": "no trial"}, "Check before the measurement (loader): slow."),
        ("failed", "tables", {"n": 1, "reasons": ("noise",), "evidence": ""}, BROKEN),
        ("open", "too_few_devices", {"n": 2, "subject": "16, 32"}, f"2 cells on 16, 32 devices: {OPEN}"),
        ("open", "out_of_memory", {"n": 2, "reasons": ("batch 64 is too large",)}, "2 cells: batch 64 is too large."),
        ("training", "reached", {**TARGET, "value": 5.0}, f"{DDP}: shortest median time to acc >= 0.9: 5 s."),
        ("training", "missed", TARGET, "Global batch 256: no training reached acc >= 0.9 with every seed."),
    ],
)
def test_other_statements(topic: str, code: str, columns: dict[str, Any], expected: str) -> None:
    assert text_of({"topic": topic, "code": code, **columns}) == expected


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
    assert sentence.lead == "34 of 37 planned trials have no result"
    assert sentence.text == f"{why}. What follows rests on the others."


FAILED = {"code": "failed", "cell_id": "a", "others": ("b",), "n": 2}


@pytest.mark.parametrize(
    ("columns", "lead", "text"),
    [
        ({"code": "time_up", "reasons": ("time is up",), "n": 1}, "1 cell lacks trials", "time is up."),
        (FAILED, "2 cells have no result", f"no trial succeeded ({DDP}, {FSDP})."),
    ],
)
def test_cells_that_lack_trials_are_named_first(columns: dict[str, Any], lead: str, text: str) -> None:
    (sentence,) = sentences_on("incomplete", {"topic": "incomplete", **columns})
    assert (sentence.lead.partition(" (")[0], sentence.text) == (lead, text)
    assert "INCOMPLETE" not in verdict_of(FASTEST).by_heading


def test_many_statements_are_cut_and_what_is_left_out_of_the_claims_is_named() -> None:
    found = sentences_on("fastest", *[FASTEST] * (MOST + 3))
    assert len(found) == MOST + 1 and found[-1].text == "And 3 more, in tables/verdict.csv."
    cells = [{**CELL, "cell_id": "a", "strategy": "dp", "emulated": True}, {**CELL, "cell_id": "b"}]
    (sentence,) = sentences_on("open", cells=cells, leaders=[{**CELL, "cell_id": "b"}])
    assert sentence.lead == "Left out of these claims" and sentence.text.startswith("dp (emulated); ")
    assert sentences_on("open", cells=cells[1:], leaders=[{**CELL, "cell_id": "b"}]) == []


def test_nothing_measured_is_a_failure_and_rehearsals_alone_make_no_claim() -> None:
    (failure,) = sentences_on("failed", trials=[{**CELL, "trial_id": "a", "cell_id": "a", "outcome": "oom"}])
    assert failure.lead == "Nothing was measured"
    (sentence,) = sentences_on("fastest", cells=[{**CELL, "cell_id": "a", "emulated": True}])
    assert sentence.lead == "No claim about speed"
    assert all(tag in sentence.text for tag in TAGS)


# -- what to use ------------------------------------------------------------------------------------------------------


RATE = "1,000 (900 to 1,100) samples/s over 5 blocks"
STATED = {**FASTEST, "low": 900.0, "high": 1100.0}
OVER = {"base_id": "base", "base_strategy": "single", "base_devices": 1, "base_throughput_per_s": 150.0}
RATIO = {**CELL, **OVER, "cell_id": "a", "speedup": 7.0, "low": 6.5, "high": 7.5, "p_value": 0.001}


CLEAR = f"{DDP}: 7.00 (6.50 to 7.50) times the throughput of {BASE}, clear; {RATE}."
LEANING = f"{DDP}: 1.23 (0.95 to 1.58) times the throughput of {BASE}, leaning (p = 0.12); {RATE}."
UNDECIDED = LEANING.replace("leaning (p = 0.12)", "open (p = 0.21)")
UNKNOWN = f"{DDP}: 7.00 times the throughput of {BASE}, open, as fewer than 3 blocks have no interval; {RATE}."
SLOWER = {"speedup": 0.7, "low": 0.68, "high": 0.72}
FEW = {"speedup": 1.23, "low": 0.95, "high": 1.58}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, CLEAR),
        ({**FEW, "p_value": 0.12}, LEANING),
        ({**FEW, "p_value": 0.21}, UNDECIDED),
        ({"low": None, "high": None, "p_value": None}, UNKNOWN),
        (SLOWER, CLEAR.replace("7.00 (6.50 to 7.50)", "0.70 (0.68 to 0.72)")),
        (
            {"base_strategy": "ddp", "base_devices": 2, "scaling": "strong"},
            CLEAR.replace(BASE, "2 devices (ddp) at the same global batch"),
        ),
    ],
    ids=["clear", "leaning", "open", "no interval", "slower", "another base"],
)
def test_it_names_strategy_devices_and_batch_and_what_it_is_compared_with(
    change: dict[str, Any], expected: str
) -> None:
    assert text_of(STATED, scaling=[{**RATIO, **change}]) == expected


def test_what_widens_the_interval_is_said_where_a_decision_is_open() -> None:
    doubts = (CountedDoubt("windows drift", 2, 5), CountedDoubt("memory swapped", 1, 5))
    for p_value, said in ((0.12, True), (0.01, False)):
        text = text_of(
            STATED, scaling=[{**RATIO, "p_value": p_value}], cells=[{**CELL, "cell_id": "a", "doubts": doubts}]
        )
        assert ("Its interval is wide: the speed changed during a measurement (2 of 5 trials)." in text) == said


def test_a_setting_without_a_ratio_says_so() -> None:
    assert text_of(STATED) == f"{DDP}: {RATE}; not compared with one device, which has no result beside it."
    assert text_of({**STATED, "cell_id": "base"}) == f"single on 1 device · batch 32: {RATE}."


RIVALS = [
    {**CELL, "cell_id": "a", "leader_id": "a", "ratio": 1.0},
    {**CELLS["b"], "cell_id": "b", "leader_id": "a", "ratio": 0.8, "low": 0.75, "high": 0.85, "p_value": 0.3},
]


FASTER = "Faster on 8 devices at this batch than fsdp (0.80 times the throughput of ddp, 0.75 to 0.85)."
TIED = (
    "Not clearly faster than fsdp (0.80 times the throughput of ddp, 0.75 to 0.85; open (p = 0.3); of so many "
    "comparisons one may differ as much by chance)."
)
SMALLEST = "The smallest batch that reaches 95 % of the highest throughput on 8 devices."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, FASTER),
        ({"others": ("b",), "tied": True}, TIED),
        ({"reasons": ("b",)}, "For lack of blocks not compared with fsdp on 8 devices · batch 32/device."),
        ({"code": "smallest batch"}, f"{FASTER} {SMALLEST}"),
    ],
)
def test_the_other_settings_are_named_with_their_ratio(change: dict[str, Any], expected: str) -> None:
    tied = change.pop("tied", False)
    text = text_of({**STATED, **change}, scaling=[RATIO], leaders=[RIVALS[0], {**RIVALS[1], "tied": tied}])
    assert text == f"{CLEAR} {expected}"


@pytest.mark.parametrize(("tied", "high", "said"), [(True, 0.99, True), (True, 1.01, False), (False, 0.99, False)])
def test_an_interval_that_excludes_1_without_a_clear_difference_is_explained(
    tied: bool, high: float, said: bool
) -> None:
    rival = {**RIVALS[1], "ratio": 0.9, "low": 0.85, "high": high, "tied": tied}
    text = text_of({**STATED, "others": ("b",) if tied else ()}, leaders=[RIVALS[0], rival])
    assert ("; of so many comparisons one may differ as much by chance)" in text) == said


def test_settings_of_one_strategy_are_named_in_full_and_what_a_ratio_is_over_once() -> None:
    rival = {**RIVALS[1], "strategy": "ddp", "cell_id": "base"}
    assert "than single on 1 device · batch 32 (0.80 times" in text_of(STATED, leaders=[RIVALS[0], rival])
    found = verdict_of(STATED, {**STATED, "topic": "fewer"}, scaling=[RATIO]).by_heading
    (first,), (second,) = found["Fastest"], found["On fewer devices"]
    assert BASE in first.text and "throughput of 1 device, clear; 1,000" in second.text


def test_fewer_devices_have_the_same_sentence() -> None:
    fewer = {**STATED, "topic": "fewer", "others": ("b",)}
    assert text_of(fewer, leaders=[RIVALS[0], {**RIVALS[1], "tied": True}]).endswith(TIED)
    slower = text_of(fewer, scaling=[{**RATIO, **SLOWER}])
    assert f"0.70 (0.68 to 0.72) times the throughput of {BASE}, clear; " in slower
