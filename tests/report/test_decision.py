"""The decision: at most eight labels, each short; what is not clear is open, and never what to use."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.improvements import CONFIRMATION, SCREENING
from harness.analysis.verdict.rules import HOST as IDLE
from harness.record.schema import IMPROVEMENTS
from harness.report.sentences import LINES, MOST_PARTS
from harness.report.tables.ratios import improvements_table
from harness.report.tables.text import NO_BREAK
from tests.report.test_causes import cause
from tests.report.test_verdict import (
    CELL,
    CELLS,
    CHOICE,
    DDP,
    FAILED,
    FASTEST,
    RATIO,
    RIVALS,
    STATED,
    TRUST,
    verdict_of,
)

SINGLE = "single on 1 device · batch 32"
ALTHOUGH = "although 7.00 (6.50 to 7.50) times 1 device."
OPEN = {"topic": "open", "code": "too_few_devices", "n": 2, "subject": "16", "cell_id": None}


def lines(*statements: dict[str, Any], **given: Any) -> dict[str, list[str]]:
    """Return the texts of the lines by label, without the next step's."""
    found = verdict_of(*statements, **given).lines
    assert [*found][-1] == "NEXT" and len(found) <= 8 and found["NEXT"][0].command
    return {
        label: [f"{one.lead}: {one.text}".removeprefix(": ").replace(NO_BREAK, " ") for one in parts]
        for label, parts in found.items()
        if label != "NEXT"
    }


@pytest.mark.parametrize(
    ("change", "label", "said"),
    [
        ({}, "USE", f"{DDP}: 7.00 (6.50 to 7.50) times 1 device, for 1.14 times the device time a sample."),
        ({"base_devices": 8, "speedup": 1.2}, "USE", f"{DDP}: 1.20 (6.50 to 7.50) times strategy single."),
        ({"speedup": 0.7}, "USE", f"{SINGLE}: {DDP} has only 0.70 (6.50 to 7.50) of its throughput."),
        ({"speedup": 0.9, "p_value": 0.3}, "USE", f"1 device: no gain shown by {DDP}: 0.90 (6.50 to 7.50) times."),
        ({"p_value": 0.12}, "OPEN", f"1 device, or {DDP}: 7.00 (6.50 to 7.50) times, leaning (p = 0.12)."),
        ({"p_value": 0.026}, "OPEN", f"1 device, or {DDP}: 7.00 (6.50 to 7.50) times, leaning (p = 0.026)."),
        (
            {"p_value": None, "low": None, "high": None, "speedup": 0.9},
            "OPEN",
            f"1 device, or {DDP}: 0.90 times, open, as fewer than 3 blocks have no interval.",
        ),
    ],
)
def test_a_setting_is_to_be_used_if_its_gain_is_clear(change: dict[str, Any], label: str, said: str) -> None:
    assert lines(STATED, scaling=[{**RATIO, **change}]) == {label: [said]}


def test_a_setting_without_a_base_is_to_be_used_if_nothing_beside_it_may_be_as_fast() -> None:
    assert set(lines(STATED)) == {"USE"}
    for beside in ({"others": ("b",)}, {"reasons": ("b",)}):
        assert set(lines({**STATED, **beside}, leaders=RIVALS)) == {"OPEN"}


@pytest.mark.parametrize(
    ("change", "label", "said"),
    [
        ({}, "NOT", "fsdp (0.80 times the throughput of ddp, 0.75 to 0.85)."),
        ({"reasons": ("b",)}, "OPEN", "ddp on 8 devices · batch 32/device, or another setting: fsdp (0.80 times"),
        ({"others": ("b",)}, "OPEN", "ddp on 8 devices · batch 32/device, or another setting: fsdp (0.80 times"),
    ],
)
def test_a_rival_is_not_to_be_used_if_it_is_clearly_slower(change: dict[str, Any], label: str, said: str) -> None:
    found = lines({**STATED, **change}, scaling=[RATIO], leaders=RIVALS)
    assert set(found) == {"USE", label} and found[label][0].startswith(said)
    for not_used in ({"speedup": 0.7}, {"speedup": 0.9, "p_value": 0.3}):
        assert "OPEN" not in lines({**STATED, **change}, scaling=[{**RATIO, **not_used}], leaders=RIVALS)


def test_one_process_with_all_threads_stands_beside_several_devices_of_a_cpu() -> None:
    pair = {**CELLS["a"], "axis": "threads", "cell_id": "a", "other_id": "base", "p_value": 0.001}
    pair |= {"ratio": 1.21, "low": 1.14, "high": 1.29}
    (said,) = lines(STATED, scaling=[RATIO], versus=[pair])["USE"]
    assert said.endswith("a sample; 1.21 (1.14 to 1.29) times one process with all CPU threads.")
    for change, ends in (
        ({"p_value": 0.2, "low": 0.9}, "1.21 (0.90 to 1.29) times, leaning (p = 0.2)"),
        ({"p_value": None, "low": None, "high": None}, "1.21 times, open, as fewer than 3 blocks have no interval"),
    ):
        (said,) = lines(STATED, scaling=[RATIO], versus=[{**pair, **change}])["USE"]
        assert said.endswith(f"a sample; not clearly faster than one process with all CPU threads: {ends}.")
    for change in ({"ratio": None}, {"cell_id": "b"}, {"axis": "compile"}):
        (said,) = lines(STATED, scaling=[RATIO], versus=[{**pair, **change}])["USE"]
        assert said.endswith("a sample.")


def test_one_process_with_all_threads_is_to_be_used_if_several_devices_of_a_cpu_show_no_gain_over_it() -> None:
    pair = {**CELLS["a"], "axis": "threads", "cell_id": "a", "other_id": "base", "ratio": 0.8, "low": 0.7, "high": 0.9}
    for p_value in (0.001, 0.2):
        (said,) = lines(STATED, scaling=[RATIO], versus=[{**pair, "p_value": p_value}])["USE"]
        assert (
            said == f"one process with all CPU threads: no gain shown by {DDP}: 0.80 (0.70 to 0.90) times, {ALTHOUGH}"
        )


def test_a_base_that_is_faster_is_named_whatever_one_process_with_all_threads_is() -> None:
    pair = {**CELLS["a"], "axis": "threads", "cell_id": "a", "other_id": "base", "ratio": 0.8, "p_value": 0.001}
    found = [lines(STATED, scaling=[{**RATIO, "speedup": 0.7}], versus=versus)["USE"] for versus in ([pair], [])]
    assert found[0] == found[1]


def test_a_base_that_is_to_be_used_has_its_better_batch_beside_it() -> None:
    pair = {**CELLS["base"], "axis": "per_device_batch_size", "value": "256", "other_value": "32", "cell_id": "big"}
    pair |= {"other_id": "base", "ratio": 1.5, "low": 1.3, "high": 1.75, "p_value": 0.001}
    slower, faster = ({"speedup": 0.7}, "; on 1 device batch 256 is 1.50 (1.30 to 1.75) times as fast.")
    (said,) = lines(STATED, scaling=[{**RATIO, **slower}], versus=[pair])["USE"]
    assert said.endswith(f"of its throughput{faster}")
    for change in ({"p_value": 0.2}, {"ratio": 0.8}, {"other_id": "b"}, {"axis": "compile"}):
        (said,) = lines(STATED, scaling=[{**RATIO, **slower}], versus=[{**pair, **change}])["USE"]
        assert said.endswith("of its throughput.")


def test_without_a_ratio_the_throughput_is_said() -> None:
    assert lines({**FASTEST, "cell_id": "base"}) == {"USE": [f"{SINGLE}: 1,000 samples/s."]}


def test_the_smallest_of_batches_that_are_about_as_fast_is_called_that() -> None:
    smallest = {**STATED, "code": "smallest batch"}
    for row, ratios in ((smallest, [RATIO]), ({**smallest, "cell_id": "base"}, [])):
        (said,) = lines(row, scaling=ratios)["USE"]
        assert said.endswith(". The smallest batch that reaches 95 % of the highest throughput.")


OF_A = "ddp on 8 devices · batch 32/device:"


def test_causes_trust_options_and_what_has_no_result_have_a_line_each() -> None:
    equivalent = {"topic": "equivalence", "code": "equivalent", "value": 0.0, "n": 2}
    unlike = {"topic": "equivalence", "code": "not equivalent", "cell_id": "b", "subject": "other updates"}
    found = lines(
        *(STATED, CHOICE, {**CHOICE, "code": "leaning", "p_adjusted": 0.1}, TRUST, equivalent, unlike, OPEN),
        *(cause("waiting for data", 0.5, 0.4), cause("rest", 0.2, 0.1), cause("wrapper", 0.1, -0.1)),
        {"topic": "incomplete", "code": "missing", "n": 3},
        scaling=[RATIO],
    )
    assert list(found) == [label for label in LINES if label not in ("NOT", "TARGET", "TRIED")]
    option = "ddp x8 · bucket_cap_mb=25 / 1: 1.20 times the throughput"
    assert found["OPTIONS"] == [f"{option}.", f"{option}, leaning (p = 0.1)."]
    assert found["WHY"] == [f"{OF_A} 50 % waiting for data, 20 % unexplained."]
    assert [text.partition(":")[0] for text in found["SURE"]] == ["Low", "fsdp on 8 devices · batch 32/device"]
    lost = [{**RATIO, "efficiency": 0.67}]
    (said,) = lines(STATED, cause("wrapper", 0.2, 0.1), scaling=lost)["WHY"]
    assert said == f"{OF_A} 20 % wrapper overhead, of 33 % lost; 13 % in smaller or uncertain parts."
    (said,) = lines(STATED, cause("wrapper", 0.2, 0.1), cause("rest", 0.3, 0.1), scaling=lost)["WHY"]
    assert said.endswith("of 33 % lost; measured one by one, they exceed it by 17 %.")
    (said,) = lines(STATED, cause("wrapper", 0.3, 0.1), scaling=lost)["WHY"]
    assert said == f"{OF_A} 30 % wrapper overhead, of 33 % lost."
    saved = (cause("wrapper", 0.2, 0.1), {**cause("threads", -0.12, -0.2), "high": -0.05, "code": "saved"})
    (said,) = lines(STATED, *saved, scaling=lost)["WHY"]
    assert said == f"{OF_A} 20 % wrapper overhead, of 33 % lost; 25 % in smaller or uncertain parts; 12 % saved."
    (said,) = lines(STATED, cause("wrapper", 0.2, 0.1), cause(IDLE, 0.25, 0.2), scaling=lost)["WHY"]
    assert said == f"{OF_A} 20 % wrapper overhead, 25 % {IDLE}."  # of which other parts may be some
    withheld = {**cause("rest", 0.3, 0.1), "reasons": ("the measured parts miss it by 40 % of the step",)}
    (said,) = lines(STATED, withheld, scaling=lost)["WHY"]
    assert said == f"{OF_A} 30 % unexplained, of 33 % lost."  # the reasons below have why
    whole, phases = cause("waiting for data", 0.5, 0.4, evidence="figure-phases"), [{"cell_id": "base", "waits": 0.48}]
    (said,) = lines(STATED, whole, cause("wrapper", 0.2, 0.1), scaling=lost, phases=phases)["WHY"]
    assert said == f"{OF_A} 50 % waiting for data (48 % on 1 device), 20 % wrapper overhead."
    more = [{**CELL, "cell_id": "a", "part": "waiting for data", "share": 0.18, "position": 1}]  # of a longer step
    longer = [{"cell_id": "base", "waits": 0.55}]
    (said,) = lines(STATED, whole, scaling=lost, phases=longer, waterfall=more)["WHY"]
    assert said == f"{OF_A} 50 % waiting for data (55 % on 1 device)."
    more[0]["share"] = 0.02
    given = {"scaling": lost, "phases": phases, "waterfall": more}
    (said,) = lines(STATED, whole, cause("wrapper", 0.2, 0.1), **given)["WHY"]
    waits = "50 % waiting for data (48 % on 1 device, so no loss of scaling)"
    assert said == f"{OF_A} {waits}, 20 % wrapper overhead, of 33 % lost; 13 % in smaller or uncertain parts."
    (said,) = lines(STATED, whole, **given)["WHY"]
    assert said == f"{OF_A} {waits}."
    assert found["OPEN"] == ["2 cells on 16 devices: this machine has too few; the same file runs on a larger one."]


def test_nothing_significant_and_no_more_than_a_few_parts_a_line() -> None:
    assert lines(STATED, cause("wrapper", 0.2, -0.1), scaling=[RATIO])["WHY"] == [
        f"{OF_A} no bottleneck is significant."
    ]
    many = lines(*[{**FASTEST, "cell_id": "base"}] * (MOST_PARTS + 2))["USE"]
    assert len(many) == MOST_PARTS + 1 and many[-1] == "And 2 more, below."


def test_a_run_without_a_result_says_so_and_what_to_do() -> None:
    trials = [{**CELL, "trial_id": "a", "cell_id": "a", "outcome": "oom"}]
    unknown = {"topic": "equivalence", "code": "unknown", "cell_id": "a", "subject": "unknown: it was not run"}
    (label,) = lines({"topic": "incomplete", **FAILED}, unknown, trials=trials)
    assert label == "INCOMPLETE"


def trained(cell_id: str, *seconds: float) -> list[dict[str, Any]]:
    named = {**CELLS[cell_id], "cell_id": cell_id}
    return [{**named, "seed": n, "time_to_target_s": each} for n, each in enumerate(seconds)]


def test_a_target_that_was_reached_has_a_line_without_a_winner_if_seeds_are_few() -> None:
    trained_to = {"topic": "training", "cell_id": "a", "subject": "acc >= 0.9"}
    few = {**trained_to, "code": "few seeds", "others": ("base",), "n": 3}
    times = [*trained("a", 2.0, 4.0, 3.0), *trained("base", 5.0, 5.0, 5.0)]
    cells, how = "ddp x8 in 2 to 4 s, single x1 in 5 s", "global batch 256; 3 seeds each; no order below 5 seeds"
    assert lines(few, convergence=times) == {"TARGET": [f"acc >= 0.9: reached by {cells} ({how})."]}
    uneven = lines(few, convergence=[*times, *trained("base", 5.0)])["TARGET"][0]
    assert "at least 3 seeds each" in uneven
    alone = lines({**few, "others": (), "n": 1}, convergence=times[:1])
    assert alone == {"TARGET": ["acc >= 0.9: reached by ddp x8 in 2 s (global batch 256; 1 seed)."]}
    missed = {**trained_to, "code": "missed", "n": 1}
    file = {"convergence": {"epochs": 2}}
    assert lines(missed, experiment=file) == {
        "TARGET": ["Global batch 256: no training reached acc >= 0.9 with every seed."]
    }
    incomplete, tried = {"topic": "incomplete", "code": "missing", "n": 3}, {**IMPROVED, "code": "no option helped"}
    assert "TARGET" not in lines(missed, incomplete)
    assert list(lines(missed, CHOICE, tried, experiment=file)) == ["OPTIONS", "TRIED"]
    assert list(lines(missed, CHOICE, incomplete, tried)) == ["INCOMPLETE", "TRIED"]


IMPROVED = {"topic": "improved", "cell_id": "a", "n": 4, "wall_s": 200.0}
CONFIRMED = {**IMPROVED, "subject": "loader.workers: 2", "value": 1.14, "low": 1.08, "high": 1.2, "blocks": 5}


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ({**IMPROVED, "code": "no option helped"}, "none helped."),
        ({**IMPROVED, "code": "unfinished"}, "; no confirmation of 5 blocks was measured."),
        (
            {**CONFIRMED, "code": "confirmed"},
            "; loader.workers: 2 is confirmed, clear: 1.14 (1.08 to 1.20) times its throughput in 5 blocks of fresh "
            "processes.",
        ),
        (
            {**CONFIRMED, "code": "not confirmed", "value": 1.01, "low": 0.9, "high": 1.1},
            "is not confirmed: 1.01 (0.90 to 1.10) times its throughput in 5 blocks of fresh processes.",
        ),
        (
            {**CONFIRMED, "code": "confirmed", "subject": "precision: bf16"},
            "fresh processes; it may change what is trained, and no convergence was compared.",
        ),
        ({**CONFIRMED, "code": "not confirmed", "reasons": ("other updates",)}, "is not confirmed: other updates."),
        (
            {**CONFIRMED, "code": "unfinished", "value": None, "reasons": ("ran out of memory",)},
            "; loader.workers: 2 helped; ran out of memory.",
        ),
    ],
)
def test_what_was_tried_has_a_line_with_its_time_and_its_interval_only_if_it_was_confirmed(
    statement: dict[str, Any], words: str
) -> None:
    (line,) = lines(statement)["TRIED"]
    assert line.replace(NO_BREAK, " ").startswith("ddp on 8 devices · batch 32/device: 4 options tried in 3 min 20 s")
    assert line.replace(NO_BREAK, " ").endswith(words)


def test_in_the_table_of_what_was_tried_a_confirmation_alone_has_an_interval() -> None:
    ratio = {"ratio": 2.0, "low": 1.8, "high": 2.2, "blocks": 4, "excludes_one": True, "unit": "samples"}
    steps = [{**ratio, "step": step, "changes": "loader.workers: 2"} for step in (SCREENING, CONFIRMATION)]
    screened, confirmed = improvements_table(IMPROVEMENTS.frame(steps)).lines
    shown = [cell.replace(NO_BREAK, " ") for line in (screened, confirmed) for cell in line.cells if cell[:1] == "2"]
    assert shown == ["2.000", "2.000 (1.800 to 2.200)"]
    assert (screened.kind, confirmed.kind) == ("", "base")
