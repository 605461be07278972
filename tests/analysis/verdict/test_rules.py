"""Each rule of the verdict: a table that supports its statement, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.analysis.common import Row
from harness.analysis.results import load
from harness.analysis.stats import LEANING, OPEN
from harness.analysis.verdict import Statement, Tables, rules
from harness.analysis.verdict.rules import FASTER, SLOWER, TOO_FEW, choices, statements
from harness.plan.cell import Cell
from harness.record.schema import empty_table, table_of
from tests.conftest import Make
from tests.run_folders import make_run

WORK = {"workload": "image_classification", "data": "digits", "model": "resnet8", "strategy": "ddp", "device": "cuda"}
SIZES = {"devices": 8, "nodes": 1, "scaling": "weak", "per_device_batch_size": 32, "global_batch_size": 256}
AXES: dict[str, Any] = {**WORK, **SIZES, "precision": "fp32", "emulated": False, "oversubscribed": False, "options": {}}


def tables(look: int | None = 1, **given: list[dict[str, Any]] | None) -> Tables:
    """Return tables with these rows; a table that is None failed, one that is not given is empty."""

    def read(name: str) -> pd.DataFrame | None:
        rows = given.get(name, [])
        return None if rows is None else table_of(name).frame([{**AXES, **row} for row in rows])

    return Tables(read, look)


NOTHING = Tables(empty_table)


def leader(cell_id: str, rate: float, **columns: Any) -> dict[str, Any]:
    ends = {"throughput_low": 0.9 * rate, "throughput_high": 1.1 * rate}
    row = {"cell_id": cell_id, "leader_id": cell_id, "throughput_per_s": rate, **ends, "blocks": 5}
    return {**row, **columns}


def one(found: list[Statement]) -> Statement:
    (statement,) = found
    return statement


# -- fastest --------------------------------------------------------------------------------------------------------


def follower(
    cell_id: str, rate: float, tied: bool | None = False, leader_id: str = "a", **columns: Any
) -> dict[str, Any]:
    return leader(cell_id, rate, leader_id=leader_id, tied=tied, **columns)


def test_the_leader_on_the_most_devices_is_the_one_to_use_and_what_cannot_be_told_apart_is_named() -> None:
    rows = [leader("a", 100, devices=4, global_batch_size=128), leader("b", 90), follower("c", 80, leader_id="b")]
    found = one(rules.settings(tables(leaders=rows)))
    assert (found.topic, found.code, found.cell_id, found.n, found.others) == ("fastest", "fastest", "b", 5, ())
    row = found.row()  # of the table
    assert (row["devices"], row["value"], row["p_value"]) == (8, 90, None)
    assert (row["low"], row["high"]) == (pytest.approx(81), pytest.approx(99))
    near = [follower("b", 99, True), follower("c", 98, None), follower("d", 50)]
    found = one(rules.settings(tables(leaders=[leader("a", 100), *near])))
    assert found.others == ("b",) and found.reasons == ("c",)  # the latter was not tested


@pytest.mark.parametrize(("small", "chosen", "code"), [(96, "small", "smallest batch"), (94, "large", "fastest")])
def test_a_smaller_batch_is_preferred_if_it_gives_95_percent(small: float, chosen: str, code: str) -> None:
    rows = [leader("large", 100, per_device_batch_size=64, global_batch_size=512), leader("small", small)]
    found = one(rules.settings(tables(leaders=rows)))
    assert (found.cell_id, found.code) == (chosen, code)
    assert found.subject == "alone"  # at that batch there is nothing that it could be faster than


def test_the_same_is_said_of_fewer_devices_on_which_there_was_a_choice() -> None:
    on_four = {"devices": 4, "global_batch_size": 128}
    rows = [
        leader("a", 100),
        leader("b", 60, **on_four),
        follower("c", 50, leader_id="b", **on_four),
        leader("d", 30, devices=2, global_batch_size=64),
        *(leader(name, rate, leader_id="e", devices=1) for name, rate in (("e", 10), ("f", 9))),
    ]
    most, fewer = rules.settings(tables(leaders=rows))
    assert (most.topic, most.cell_id) == ("fastest", "a")
    assert (fewer.topic, fewer.cell_id, fewer.facts.devices, fewer.subject) == ("fewer", "b", 4, None)


def test_settings_of_other_networks_or_models_do_not_compete() -> None:
    widths = [{"options": {"workload.width": width}} for width in (8, 64)]
    found = rules.settings(tables(leaders=[leader("a", 200, **widths[0]), leader("b", 100, **widths[1])]))
    assert [statement.cell_id for statement in found] == ["a", "b"]
    found = rules.settings(tables(leaders=[leader("a", 1), leader("b", 2, model="resnet14")]))
    assert [statement.cell_id for statement in found] == ["a", "b"]


def test_a_table_that_failed_costs_what_needs_it_and_is_named_last_and_without_a_measurement_nothing_is_said() -> None:
    *found, last = statements(tables(leaders=[leader("a", 100)], scaling=None, missing=None))
    assert [statement.topic for statement in found] == ["fastest"]
    assert (last.topic, last.code, last.reasons, last.n) == ("failed", "tables", ("missing", "scaling"), 2)
    assert statements(NOTHING) == []


# -- scaling --------------------------------------------------------------------------------------------------------


ENDS = ("efficiency", "efficiency_low", "efficiency_high")


def point(cell_id: str, devices: int, *ends: float | None, **columns: Any) -> dict[str, Any]:
    known = {"cell_id": cell_id, "base_devices": 1, "devices": devices, "blocks": 5}
    return {**known, **dict(zip(ENDS, ends, strict=True)), **columns}


def efficiencies_of(*points: dict[str, Any], leading: dict[str, Any] | None = None) -> list[Statement]:
    """Return what is stated of the efficiency of these cells of one family; the last one leads."""
    trials = [{"cell_id": row["cell_id"], "family_id": "ddp"} for row in points]
    leader = Row({**AXES, "device_ids": None, "cell_id": points[-1]["cell_id"], **(leading or {})})
    return rules.efficiencies(tables(scaling=[*points], trials=trials), [leader])


def test_the_efficiency_of_every_number_of_devices_is_stated_the_most_last() -> None:
    found = efficiencies_of(point("x4", 4, 0.7, 0.65, 0.75), point("x2", 2, 0.95, None, None))
    assert [(one.facts.devices, one.facts.efficiency, one.facts.efficiency_low) for one in found] == [
        (2, 0.95, None),
        (4, 0.7, 0.65),
    ]


def test_efficiency_is_that_of_equivalent_cells_on_the_nodes_of_the_leading_cell() -> None:
    for excluded, devices in ((None, [2, 4]), ("not equivalent", [2])):
        two, four = (point(f"x{n}", n, 0.9, 0.85, 0.95, excluded=excluded if n == 4 else None) for n in (2, 4))
        assert [found.facts.devices for found in efficiencies_of(two, four)] == devices
    points = (point("two", 4, 0.6, 0.5, 0.7, nodes=2), point("one", 4, 0.9, 0.85, 0.95, nodes=1))
    for nodes, cell_id in ((1, "one"), (2, "two")):
        assert one(efficiencies_of(*points, leading={"cell_id": cell_id, "nodes": nodes})).cell_id == cell_id
    assert efficiencies_of(point("x1", 1, 1.0, 1.0, 1.0)) == []


# -- training -------------------------------------------------------------------------------------------------------


def seed(cell_id: str, seconds: float | None, number: int = 0, **columns: Any) -> dict[str, Any]:
    named = {"cell_id": cell_id, "seed": number, "target": "val_accuracy >= 0.9"}
    return {**named, "reached": seconds is not None, "time_to_target_s": seconds, **columns}


def test_the_training_with_the_least_median_time_was_first_and_overlapping_times_are_named() -> None:
    fast = [seed("fast", t) for t in (4, 5, 5, 6, 9)]
    found = one(rules.training(tables(convergence=[*(seed("slow", t) for t in (10, 11, 12, 12, 13)), *fast])))
    assert (found.code, found.cell_id, found.others, found.n) == ("reached", "fast", (), 5)
    assert [found.row()[name] for name in ("value", "low", "high")] == [5, 4, 9]
    overlapping = [*(seed("slow", t) for t in (8, 11, 12, 12, 13)), *fast]
    assert one(rules.training(tables(convergence=overlapping))).others == ("slow",)


def test_with_fewer_than_five_seeds_no_training_is_before_another() -> None:
    for few, many in ((4, 5), (5, 4), (1, 1)):
        rows = [*(seed("slow", t) for t in range(10, 10 + few)), *(seed("fast", t) for t in range(1, 1 + many))]
        found = one(rules.training(tables(convergence=rows)))
        assert (found.code, found.cell_id, found.others) == ("few seeds", "fast", ("slow",))


def test_trainings_at_the_same_global_batch_are_compared_whatever_their_order_in_the_table() -> None:
    small, large = {"global_batch_size": 32}, {"global_batch_size": 64}
    rows = [seed("a", 8, **small), seed("b", 4, **large), seed("c", 7, **small), seed("d", 3, **large)]
    found = rules.training(tables(convergence=rows))
    assert [(statement.cell_id, statement.facts.time_to_target_s) for statement in found] == [("c", 7), ("d", 3)]


def test_a_cell_with_a_seed_that_missed_is_not_the_first_and_if_every_cell_has_one_that_is_said() -> None:
    rows = [seed("fast", 1), seed("fast", None), seed("slow", 10)]
    assert one(rules.training(tables(convergence=rows))).cell_id == "slow"
    assert one(rules.training(tables(convergence=[seed("a", None), seed("b", None)]))).code == "missed"


@pytest.mark.parametrize(
    "row",
    [
        *(
            seed("a", 1, **columns)
            for columns in ({"emulated": True}, {"oversubscribed": True}, {"excluded": "differs"})
        ),
        {"cell_id": "a", "seed": 0, "val_accuracy": 0.9},
    ],
    ids=["emulated", "oversubscribed", "not equivalent", "without a target"],
)
def test_rehearsals_and_other_trainings_win_nothing(row: dict[str, Any]) -> None:
    assert rules.training(tables(convergence=[row])) == []


# -- equivalence, failures, open questions --------------------------------------------------------------------------


def test_equivalence_is_one_statement_with_the_largest_difference_or_one_for_each_check_that_lacks_it() -> None:
    rows = [{"cell_id": "a", "equivalent": True, "difference": d} for d in (1e-6, 3e-6)]
    found = one(list(rules.equivalence(tables(equivalence=rows))))
    assert (found.code, found.n, found.facts.difference) == ("equivalent", 2, 3e-6)
    differs = {"cell_id": "b", "equivalent": False, "difference": 0.5, "reason": "not equivalent to one device"}
    unknown = {"cell_id": "c", "equivalent": None, "reason": "unknown: nothing"}
    found = list(rules.equivalence(tables(equivalence=[rows[0], differs, unknown])))
    assert [(statement.code, statement.cell_id) for statement in found] == [("not equivalent", "b"), ("unknown", "c")]


def trial(trial_id: str, outcome: str = "skipped", skip_code: str | None = None, **columns: Any) -> dict[str, Any]:
    named = {"trial_id": trial_id, "cell_id": trial_id[0], "outcome": outcome, "reason": f"because of {outcome}"}
    return {"kind": "throughput", **named, "skip_code": skip_code, **columns}


def stated(rule: Callable[[Tables], Any], *trials: dict[str, Any], **given: list[dict[str, Any]]) -> list[Statement]:
    return list(rule(tables(trials=[*trials], **given)))


def test_failures_are_counted_by_outcome_and_by_cause_and_the_last_attempt_counts() -> None:
    lost = (trial("a1", "lost"), trial("a1", "ok"), trial("b1", "oom"), trial("c1", "oom"), trial("d1"))
    found = one(stated(rules.failures, *lost))
    assert (found.subject, found.n, found.cell_id, found.others) == ("oom", 2, "b", ("c",))
    assert found.reasons == ("because of oom",)
    errors = (trial(f"{cell}1", "error", reason=words) for cell, words in (("a", "bad shape"), ("b", "NCCL")))
    causes = [(one.cell_id, one.reasons) for one in stated(rules.failures, *errors, trial("c1", "error"))]
    assert causes == [("a", ("bad shape",)), ("b", ("NCCL",)), ("c", ("because of error",))]


def test_an_error_that_several_ranks_report_is_one_cause() -> None:
    same = [trial(f"{cell}1", "error", reason=f"ValueError on rank {rank}: bad") for rank, cell in enumerate("ab")]
    found = one(stated(rules.failures, *same))
    assert (found.cell_id, found.others, found.n) == ("a", ("b",), 2)
    assert len(stated(rules.failures, *same, trial("c1", "error", reason="ValueError on rank 0: worse"))) == 2


def test_errors_of_the_doctor_are_failures_and_warnings_are_not() -> None:
    rows = [{"check": "loader", "severity": level, "seen": "slow"} for level in ("error", "warning", "note")]
    found = one(stated(rules.failures, findings=rows))
    assert (found.code, found.subject, found.reasons) == ("preflight", "loader", ("slow",))
    ended = trial("a1", "error", kind="diagnostic", purpose="doctor")
    seen = [{**rows[0], "cell_id": cell_id, "seen": words} for cell_id, words in (("a", "E: bad"), ("b", "E: worse"))]
    same = {**ended, "reason": "E on rank 1: bad"}
    found = one(stated(rules.failures, same, findings=seen))
    assert (found.code, found.cell_id, found.others, found.reasons) == ("preflight", "a", (), ("E: bad", "E: worse"))
    for other in (ended, {**same, "cell_id": "c"}):  # whose error no finding of the cell says
        assert [each.code for each in stated(rules.failures, other, findings=seen)] == ["trials", "preflight"]


def test_a_run_that_lacks_trials_or_a_result_of_a_cell_is_incomplete() -> None:
    found = one(stated(rules.incomplete, missing=[{"trial_id": "a"}, {"trial_id": "b"}]))
    assert (found.topic, found.code, found.n) == ("incomplete", "missing", 2)
    errors = (trial("a1", "error"), trial("a2", "ok"), trial("b1", "oom"), trial("b2", "error"))
    left_out = (trial("c1", skip_code="doctor"), trial("e1", skip_code="too_few_devices"))
    found = one(stated(rules.incomplete, *errors, *left_out, trial("d1", "error", kind="diagnostic")))
    assert (found.code, found.cell_id, found.others, found.n) == ("failed", "b", ("c",), 2)
    found = one(stated(rules.incomplete, *(trial(f"{cell}1", skip_code="time_up") for cell in "ab")))
    assert (found.code, found.n, found.reasons) == ("time_up", 2, ("because of skipped",))
    assert stated(rules.incomplete, trial("a1", "ok"), trial("b1", skip_code="precise")) == []


def test_what_the_machine_or_its_memory_left_out_is_open_and_other_skips_are_not() -> None:
    few = (trial(f"{cell}1", skip_code="too_few_devices", devices=devices) for cell, devices in (("a", 8), ("b", 4)))
    found = one(stated(rules.open_questions, *few, trial("c1", skip_code="precise", devices=2)))
    assert (found.code, found.n, found.subject) == ("too_few_devices", 2, "4, 8")
    codes = ("time_up", "out_of_memory", "strategy_devices", "doctor")
    later = (trial("d1", "ok"), trial("d2", skip_code="doctor", devices=2))  # as after a training that diverged
    assert one(stated(rules.open_questions, *later)).code == "doctor"
    found = one(stated(rules.open_questions, *(trial(f"{code[0]}1", skip_code=code) for code in codes)))
    assert (found.code, found.n, found.reasons) == ("out_of_memory", 1, ("because of skipped",))


# -- causes of a step's length --------------------------------------------------------------------------------------


Part = tuple[str, float, float | None]


def causes_of(*parts: Part, waits: float | None = None, low: float | None = None) -> list[Statement]:
    """Return the causes of a cell with these parts (share, lower end), which waits for data for a share of its step."""
    rows = [
        {"cell_id": "a", "part": part, "share": share, "low": end, "high": None if end is None else 2 * share - end}
        for part, share, end in parts
    ]
    phases: dict[str, Any] = {"cell_id": "a", "waits": waits, "waits_low": low, "waits_high": low and 1.0, "blocks": 3}
    return rules.causes(tables(waterfall=rows, phases=[phases]), [Row({"cell_id": "a"})])


def test_causes_and_what_is_saved_are_one_list_by_size() -> None:
    found = causes_of(
        ("ideal", 0.1, 0.1),
        ("wrapper", 0.02, -0.1),
        ("exposed communication", 0.07, 0.01),
        ("rest", 0.05, None),
        waits=0.81,
        low=0.73,
    )
    assert [(one.subject, one.facts.share, one.code) for one in found] == [
        ("waiting for data", 0.81, "clear"),
        ("exposed communication", 0.07, "clear"),
        ("rest", 0.05, "no interval"),
        ("wrapper", 0.02, "unclear"),
    ]
    wait = found[0]
    assert (wait.facts.low, wait.facts.high, wait.n, wait.evidence) == (0.73, 1.0, 3, "figure-phases")
    found = causes_of(
        ("wrapper", -0.1, -0.15), ("side by side", -0.02, -0.05), ("rest", -0.03, None), ("slowest rank", 0.9, 0.8)
    )
    assert [(one.subject, one.code) for one in found] == [
        ("slowest rank", "clear"),
        ("side by side", "unclear"),
        ("rest", "saved"),
        ("wrapper", "saved"),
    ]


def test_a_part_with_a_second_measurement_says_what_that_is() -> None:
    rows = [{"cell_id": "a", "part": part, "share": 0.2, "reason": why} for part, why in (("x", "by two"), ("y", None))]
    found = rules.causes(tables(waterfall=rows, phases=[]), [Row({"cell_id": "a"})])
    assert [(one.subject, one.reasons) for one in found] == [("x", ("by two",)), ("y", ())]


@pytest.mark.parametrize(("waits", "named"), [(0.1, [0.1]), (0.09, [0.06]), (None, [0.06])])
def test_the_wait_for_data_is_named_once_from_10_percent_as_a_whole(waits: float | None, named: list[float]) -> None:
    found = causes_of(("waiting for data", 0.06, 0.01), waits=waits, low=0.01)
    assert [one.facts.share for one in found] == named


def test_a_wait_of_one_rank_is_the_waterfalls_for_phases_are_means_over_ranks() -> None:
    (found,) = causes_of(("waiting for data", 0.32, 0.31), waits=0.18, low=0.17)
    assert (found.facts.share, found.evidence) == (0.32, "figure-waterfall")


ON_A_GPU = {"cell_id": "a", "strategy": "ddp", "device": "cuda", "devices": 2, "options": {}, "oversubscribed": False}


@pytest.mark.parametrize(
    ("busy", "waits", "share"), [(0.5, None, None), (0.5, 0.05, 0.45), (0.5, 0.35, None), (0.81, 0.0, None)]
)
def test_a_gpu_that_is_idle_without_waiting_for_data_is_bound_by_the_host(
    busy: float, waits: float | None, share: float | None
) -> None:
    phases = {"cell_id": "a", "waits": waits, "waits_low": 0.0, "waits_high": 1.0}
    gpus = [{"cell_id": "a", "busy": busy}, {"cell_id": "b", "busy": 0.1}]
    given = tables(phases=[phases], gpus=gpus, trials=[{**ON_A_GPU, "strategy": "single", "devices": 1}])
    found = {one.subject: one for one in rules.causes(given, [Row({"cell_id": "a"})])}
    host = found.get(rules.HOST)
    assert (host and host.facts.share) == (share and pytest.approx(share))
    assert host is None or (host.code, host.evidence) == ("no interval", "gpus")
    assert ("waiting for data" in found) is (waits is not None and waits >= rules.WAITS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, True),
        ({"strategy": "dp"}, False),
        ({"strategy": "own:Own"}, False),
        ({"options": {"ddp.backend": "gloo"}}, False),
        ({"oversubscribed": True}, False),
    ],
)
def test_the_host_is_named_after_measured_parts_and_where_it_launches(change: dict[str, Any], said: bool) -> None:
    phases = {"cell_id": "a", "waits": 0.0, "waits_low": 0.0, "waits_high": 0.0}
    parts = [{"cell_id": "a", "part": part, "share": share} for part, share in (("rest", 0.1), ("wrapper", -0.1))]
    busy = [{"cell_id": "a", "busy": 0.5}]
    given = tables(waterfall=parts, phases=[phases], gpus=busy, trials=[{**ON_A_GPU, **change}])
    found = [one.subject for one in rules.causes(given, [Row({"cell_id": "a"})])]
    assert found == ["rest", *[rules.HOST] * said, "wrapper"]


def test_a_single_device_waits_for_data_too() -> None:
    assert [one.subject for one in causes_of(waits=0.3, low=0.2)] == ["waiting for data"]
    assert causes_of(waits=0.05, low=0.01) == []


def test_gains_small_parts_and_cells_that_do_not_lead_are_no_causes() -> None:
    assert causes_of(("wrapper", -0.1, -0.2), ("slowest rank", 0.009, 0.001)) == []
    other = tables(waterfall=[{"cell_id": "b", "part": "wrapper", "share": 0.5}])
    assert rules.causes(other, [Row({"cell_id": "a"})]) == []


# -- choices ----------------------------------------------------------------------------------------------------------


PAIR = {"cell_id": "25", "other_id": "1", "axis": "ddp.bucket_cap_mb", "value": "25", "other_value": "1"}
RATIO = {"ratio": 1.2, "low": 1.1, "high": 1.3, "blocks": 5, "p_value": 0.01}
BUCKETS: dict[str, Any] = {**PAIR, **RATIO, "throughput_per_s": 120.0, "other_throughput_per_s": 100.0}


def chosen(*rows: dict[str, Any], leading: str = "25") -> list[Statement]:
    return choices(tables(versus=[{**BUCKETS, **row} for row in rows]), [Row({"cell_id": leading})])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, FASTER),
        ({"ratio": 0.8}, SLOWER),
        ({"p_value": 0.2}, LEANING),
        ({"p_value": 0.21}, OPEN),
        ({"p_value": None, "low": None, "high": None, "blocks": 2}, TOO_FEW),
    ],
)
def test_a_difference_is_claimed_by_its_p_value(change: dict[str, Any], code: str) -> None:
    found = one(chosen(change))
    assert (found.code, found.cell_id, found.others) == (code, "25", ("1",))
    assert found.subject == "ddp.bucket_cap_mb 25 / 1"


def test_what_is_claimed_comes_first() -> None:
    first, *others = chosen({"p_value": 0.3}, {"p_value": 0.001}, {"p_value": 0.2})
    assert first.code == FASTER not in {other.code for other in others}


@pytest.mark.parametrize(
    "change",
    [
        *({"axis": axis} for axis in ("devices", "strategy", "model")),
        *({"excluded": "not equivalent"}, {"faulty": True}, {"emulated": True}, {"ratio": None}),
    ],
    ids=str,
)
def test_sizes_strategies_and_pairs_without_a_claim_are_left_out(change: dict[str, Any]) -> None:
    assert chosen(change) == [] and len(chosen({})) == 1


@pytest.mark.parametrize("axis", ["per_device_batch_size", "global_batch_size", "precision"])
def test_every_other_axis_is_a_choice_the_batch_too(axis: str) -> None:
    found = one(chosen({"axis": axis, "value": "64", "other_value": "32"}))
    assert (found.code, found.subject) == (FASTER, f"{axis} 64 / 32")
    others = chosen({"axis": axis}, {"axis": "training.accumulation"})
    assert others[0].subject.startswith("training.accumulation") == (axis != "precision")  # the batch comes last


def test_several_differences_are_adjusted() -> None:
    second = {"axis": "training.accumulation", "other_id": "2", "p_value": 0.03}
    assert [found.code for found in chosen({"p_value": 0.03}, second)] == [LEANING, LEANING]
    assert [found.code for found in chosen({"p_value": 0.01}, second)] == [FASTER, FASTER]


def test_the_cells_to_use_are_compared_or_the_largest_pair_of_those_that_have_the_choice() -> None:
    slow = {"cell_id": "slow 25", "other_id": "slow 1"}
    assert one(chosen({}, slow)).cell_id == "25"
    assert one(chosen({}, slow, leading="slow 1")).cell_id == "slow 25"
    few = {"cell_id": "few 25", "devices": 2}
    assert one(chosen(few, {}, leading="fsdp")).cell_id == "25"


@pytest.mark.parametrize(("gain", "code"), [(1.2, FASTER), (1.0, OPEN)])
def test_the_bucket_question_is_answered(tmp_path: Path, make_experiment: Make, gain: float, code: str) -> None:
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8, "ddp.bucket_cap_mb": [1, 25]}
    noise = [1.0, 1.02, 0.99, 1.01, 0.98]

    def rate(cell: Cell, block: int) -> float:
        large = dict(cell.options).get("ddp.bucket_cap_mb") == 25
        return 100 * (gain * noise[block] if large else noise[-block - 1])

    experiment = make_experiment(grid, throughput={"blocks": 5})
    found = load(make_run(tmp_path, experiment, rate)).verdict
    (row,) = found[found["topic"] == "choice"].to_dict("records")
    assert row["code"] == code and row["subject"] == "ddp.bucket_cap_mb 25 / 1"


@pytest.mark.parametrize(
    ("planned", "blocks", "level"),
    [
        ([5], 5, 0.025),
        ([5, 5], 5, 0.025),  # the declared blocks, in two calls
        ([5, 7, 7, 10], 5, 0.05 / 12),  # added twice, and once resumed
        ([None], 5, 0.025),  # a call without throughput
        ([9], {"at_least": 3, "at_most": 9, "halfwidth": 0.05}, 0.05),
        ([12], "decide", 0.02),
    ],
)
def test_each_time_that_blocks_are_added_is_a_look(
    tmp_path: Path, make_experiment: Make, planned: list[int | None], blocks: object, level: float
) -> None:
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8}
    experiment = make_experiment(grid, throughput={"blocks": blocks})
    results = load(make_run(tmp_path, experiment, lambda cell, block: 100.0 + block))
    vars(results)["environment"] = {"invocations": [{"blocks": count} for count in planned], "groups": []}
    assert results.significance == pytest.approx(level)


# -- ingest ----------------------------------------------------------------------------------------------------------

MODES = {"axis": "workload.mode", "value": "train", "other_value": "ingest", "ingest": True, "blocks": 5}
MODES |= {"cell_id": "t", "other_id": "i", "throughput_per_s": 50.0, "other_throughput_per_s": 100.0}


@pytest.mark.parametrize(
    ("low", "high", "code"),
    [
        (0.4, 0.6, "no bottleneck"),
        (0.95, 1.05, "bottleneck"),
        (0.4, 1.2, OPEN),
        (0.86, 0.99, OPEN),
        (None, None, rules.NO_INTERVAL),
    ],
)
def test_whether_the_ingest_is_the_bottleneck_follows_from_the_part_that_training_uses(
    low: float | None, high: float | None, code: str
) -> None:
    versus = [{**MODES, "ratio": 0.5, "low": low, "high": high}]
    units = [{"cell_id": name, "unit": "samples", "trial_id": name, "attempt": 0} for name in "ti"]
    found = one(rules.ingests(tables(versus=versus, trials=units)))
    assert (found.topic, found.code, found.cell_id, found.others) == ("ingest", code, "t", ("i",))
    assert found.row()["value"] == 0.5
    assert not rules.ingests(tables(versus=[{**versus[0], "axis": "workload.mode", "ingest": None}], trials=units))
    assert not rules.ingests(tables(versus=versus, trials=[units[0], {**units[1], "unit": "tokens"}]))
