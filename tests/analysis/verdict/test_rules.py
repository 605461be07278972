"""Each rule of the verdict: a table that supports its statement, and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import pytest

from harness.analysis.common import Record
from harness.analysis.verdict import READ, Statement, Tables, rules, statements

AXES: dict[str, Any] = {
    "workload": "image_classification",
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
    "emulated": False,
    "oversubscribed": False,
    "options": {},
}


def table(name: str, *rows: Mapping[str, Any]) -> pd.DataFrame:
    return READ[name].frame([{**AXES, **row} for row in rows])


def tables(**given: list[dict[str, Any]]) -> Tables:
    return Tables({name: table(name, *rows) for name, rows in given.items()})


def leader(cell_id: str, rate: float, **columns: Any) -> dict[str, Any]:
    ends = {"throughput_low": 0.9 * rate, "throughput_high": 1.1 * rate}
    row = {"cell_id": cell_id, "leader_id": cell_id, "throughput_per_s": rate, **ends, "blocks": 5}
    return {**row, **columns}


def one(found: list[Statement]) -> Statement:
    (statement,) = found
    return statement


# -- fastest --------------------------------------------------------------------------------------------------------


def test_the_leader_on_the_most_devices_is_the_one_to_use() -> None:
    rows = [
        leader("a", 100, devices=4, global_batch_size=128),
        leader("b", 90),
        leader("c", 80, leader_id="b", tied=False),
    ]
    found = one(rules.fastest(tables(leaders=rows)))
    assert (found.code, found.cell_id, found.devices, found.value, found.n) == ("fastest", "b", 8, 90, 5)
    assert (found.low, found.high) == (pytest.approx(81), pytest.approx(99)) and found.others == ()


def test_those_that_cannot_be_told_apart_are_named_and_untested_ones_apart() -> None:
    rows = [
        leader("a", 100),
        leader("b", 99, leader_id="a", tied=True),
        leader("c", 98, leader_id="a", tied=None),
        leader("d", 50, leader_id="a", tied=False),
    ]
    found = one(rules.fastest(tables(leaders=rows)))
    assert found.others == ("b",) and found.reasons == ("c",)


@pytest.mark.parametrize(("small", "chosen", "code"), [(96, "small", "smallest batch"), (94, "large", "fastest")])
def test_a_smaller_batch_is_preferred_if_it_gives_95_percent(small: float, chosen: str, code: str) -> None:
    rows = [leader("large", 100, per_device_batch_size=64, global_batch_size=512), leader("small", small)]
    found = one(rules.fastest(tables(leaders=rows)))
    assert (found.cell_id, found.code) == (chosen, code)
    assert found.subject == "alone"  # at that batch there is nothing that it could be faster than


def test_the_same_is_said_of_fewer_devices_on_which_there_was_a_choice() -> None:
    on_four = {"devices": 4, "global_batch_size": 128}
    rows = [
        leader("a", 100),
        leader("b", 60, **on_four),
        leader("c", 50, leader_id="b", tied=False, **on_four),
        leader("d", 30, devices=2, global_batch_size=64),
        *(leader(name, rate, leader_id="e", devices=1) for name, rate in (("e", 10), ("f", 9))),
    ]
    found = one(rules.fewer_devices(tables(leaders=rows)))
    assert (found.topic, found.cell_id, found.devices, found.subject) == ("fewer", "b", 4, None)


def test_networks_of_different_width_do_not_compete() -> None:
    widths = [{"options": {"workload.width": width}} for width in (8, 64)]
    found = rules.fastest(tables(leaders=[leader("a", 200, **widths[0]), leader("b", 100, **widths[1])]))
    assert [statement.cell_id for statement in found] == ["a", "b"]


def test_each_model_has_a_statement_of_its_own() -> None:
    found = rules.fastest(tables(leaders=[leader("a", 1), leader("b", 2, model="resnet14")]))
    assert [statement.cell_id for statement in found] == ["a", "b"]


def test_without_a_measurement_nothing_is_recommended() -> None:
    assert statements(Tables({})) == []


def test_a_table_that_failed_costs_what_needs_it_and_is_named_last() -> None:
    given: dict[str, pd.DataFrame | None] = {"leaders": table("leaders", leader("a", 100)), "scaling": None}
    *found, last = statements(Tables({**given, "missing": None, "equivalence": table("equivalence")}))
    assert [statement.topic for statement in found] == ["fastest"]
    assert (last.topic, last.code, last.reasons, last.n) == ("failed", "tables", ("missing", "scaling"), 2)


# -- scaling --------------------------------------------------------------------------------------------------------


def scaling_of(*efficiencies: tuple[int, float, float | None, float | None]) -> list[Statement]:
    rows = [
        {
            "cell_id": f"x{devices}",
            "base_devices": 1,
            "devices": devices,
            "efficiency": value,
            "efficiency_low": low,
            "efficiency_high": high,
            "blocks": 5,
        }
        for devices, value, low, high in efficiencies
    ]
    trials = [{"cell_id": row["cell_id"], "family_id": "ddp"} for row in rows]
    last = {**AXES, "cell_id": f"x{efficiencies[-1][0]}", "device_ids": None}
    return rules.scaling_limit(tables(scaling=rows, trials=trials), [Record(last)])


@pytest.mark.parametrize(
    ("efficiencies", "code", "devices", "until"),
    [
        ([(2, 0.95, 0.9, 1.0), (4, 0.9, 0.85, 0.95)], "above", 4, None),
        ([(2, 0.95, 0.9, 1.0), (4, 0.7, 0.65, 0.75)], "below", 4, "2"),
        ([(2, 0.7, 0.65, 0.75), (4, 0.6, 0.55, 0.65)], "below", 2, None),
        ([(2, 0.95, 0.9, 1.0), (4, 0.82, 0.75, 0.89)], "not clear", 4, "2"),
        ([(2, 0.95, None, None)], "not clear", 2, None),  # without an interval nothing is above
        ([(2, 0.81, 0.80, 0.82)], "not clear", 2, None),  # the interval holds 80 %
    ],
)
def test_efficiency_is_above_80_percent_only_if_its_interval_is(
    efficiencies: list[tuple[int, float, float | None, float | None]], code: str, devices: int, until: str | None
) -> None:
    found = one(scaling_of(*efficiencies))
    assert (found.code, found.devices, found.subject) == (code, devices, until)


def test_the_efficiency_of_a_cell_that_is_not_equivalent_is_not_stated() -> None:
    ends = {"base_devices": 1, "blocks": 5, "efficiency": 0.9, "efficiency_low": 0.85, "efficiency_high": 0.95}
    two, four = ({**ends, "cell_id": f"x{devices}", "devices": devices} for devices in (2, 4))
    trials = [{"cell_id": row["cell_id"], "family_id": "ddp"} for row in (two, four)]
    leader = {**AXES, "cell_id": "x4", "device_ids": None}
    for excluded, devices in ((None, 4), ("not equivalent", 2)):
        rows = [two, {**four, "excluded": excluded}]
        assert one(rules.scaling_limit(tables(scaling=rows, trials=trials), [Record(leader)])).devices == devices


def test_efficiency_is_that_on_the_nodes_of_the_leading_cell() -> None:
    ends = {"base_devices": 1, "devices": 4, "blocks": 5}
    spread = {**ends, "cell_id": "two", "nodes": 2, "efficiency": 0.6, "efficiency_low": 0.5, "efficiency_high": 0.7}
    inside = {**ends, "cell_id": "one", "nodes": 1, "efficiency": 0.9, "efficiency_low": 0.85, "efficiency_high": 0.95}
    trials = [{"cell_id": cell_id, "family_id": "ddp"} for cell_id in ("one", "two")]
    given = tables(scaling=[spread, inside], trials=trials)
    for nodes, cell_id, code in ((1, "one", "above"), (2, "two", "below")):
        found = one(
            rules.scaling_limit(given, [Record({**AXES, "cell_id": cell_id, "nodes": nodes, "device_ids": None})])
        )
        assert (found.cell_id, found.code, found.subject) == (cell_id, code, None)


def test_a_cell_on_one_device_says_nothing_about_scaling() -> None:
    assert scaling_of((1, 1.0, 1.0, 1.0)) == []


# -- training -------------------------------------------------------------------------------------------------------


def seed(cell_id: str, seconds: float | None, number: int = 0, **columns: Any) -> dict[str, Any]:
    named = {"cell_id": cell_id, "seed": number, "target": "val_accuracy >= 0.9"}
    return {**named, "reached": seconds is not None, "time_to_target_s": seconds, **columns}


def test_the_training_with_the_least_median_time_reached_the_target_first() -> None:
    slow, fast = ([seed("slow", t) for t in (10, 11, 12)], [seed("fast", t) for t in (4, 5, 9)])
    found = one(rules.training(tables(convergence=[*slow, *fast])))
    assert (found.code, found.cell_id, found.value, found.low, found.high, found.n) == ("reached", "fast", 5, 4, 9, 3)
    assert found.others == ()


def test_overlapping_times_are_named() -> None:
    rows = [*[seed("slow", t) for t in (8, 11, 12)], *[seed("fast", t) for t in (4, 5, 9)]]
    assert one(rules.training(tables(convergence=rows))).others == ("slow",)


def test_trainings_at_the_same_global_batch_are_compared_whatever_their_order_in_the_table() -> None:
    small, large = {"global_batch_size": 32}, {"global_batch_size": 64}
    rows = [seed("a", 8, **small), seed("b", 4, **large), seed("c", 7, **small), seed("d", 3, **large)]
    found = rules.training(tables(convergence=rows))
    assert [(statement.cell_id, statement.value) for statement in found] == [("c", 7), ("d", 3)]


def test_a_cell_with_a_seed_that_missed_is_not_the_first() -> None:
    rows = [seed("fast", 1), seed("fast", None), seed("slow", 10)]
    assert one(rules.training(tables(convergence=rows))).cell_id == "slow"


def test_if_every_cell_has_a_miss_that_is_said() -> None:
    assert one(rules.training(tables(convergence=[seed("a", None), seed("b", None)]))).code == "missed"


@pytest.mark.parametrize("columns", [{"emulated": True}, {"oversubscribed": True}, {"excluded": "not equivalent"}])
def test_rehearsals_and_other_trainings_win_nothing(columns: dict[str, Any]) -> None:
    assert rules.training(tables(convergence=[seed("a", 1, **columns)])) == []


def test_without_a_target_no_training_is_first() -> None:
    rows = [{"cell_id": "a", "seed": 0, "val_accuracy": 0.9}]
    assert rules.training(tables(convergence=rows)) == []


# -- equivalence, failures, open questions --------------------------------------------------------------------------


def test_all_equivalent_is_one_statement_with_the_largest_difference() -> None:
    rows = [{"cell_id": "a", "equivalent": True, "difference": d} for d in (1e-6, 3e-6)]
    found = one(list(rules.equivalence(tables(equivalence=rows))))
    assert (found.code, found.n, found.value) == ("equivalent", 2, 3e-6)


def test_each_check_that_is_not_equivalent_or_unknown_is_named() -> None:
    rows = [
        {"cell_id": "a", "equivalent": True, "difference": 1e-6},
        {"cell_id": "b", "equivalent": False, "difference": 0.5, "reason": "not equivalent to one device"},
        {"cell_id": "c", "equivalent": None, "reason": "unknown: nothing"},
    ]
    found = list(rules.equivalence(tables(equivalence=rows)))
    assert [(statement.code, statement.cell_id) for statement in found] == [("not equivalent", "b"), ("unknown", "c")]


def trial(trial_id: str, outcome: str, **columns: Any) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "cell_id": trial_id[0],
        "outcome": outcome,
        "reason": f"because of {outcome}",
        **columns,
    }


def test_failures_are_counted_by_outcome_and_the_last_attempt_counts() -> None:
    rows = [trial("a1", "lost"), trial("a1", "ok"), trial("b1", "oom"), trial("c1", "oom"), trial("d1", "skipped")]
    found = one(list(rules.failures(tables(trials=rows))))
    assert (found.subject, found.n, found.cell_id, found.others) == ("oom", 2, "b", ("c",))
    assert found.reasons == ("because of oom",)


def test_each_cause_of_a_failure_is_stated() -> None:
    rows = [trial("a1", "error", reason="bad shape"), trial("b1", "error", reason="NCCL"), trial("c1", "error")]
    found = list(rules.failures(tables(trials=rows)))
    assert [(one.cell_id, one.reasons) for one in found] == [
        ("a", ("bad shape",)),
        ("b", ("NCCL",)),
        ("c", ("because of error",)),
    ]


def test_an_error_that_several_ranks_report_is_one_cause() -> None:
    rows = [trial(f"{cell}1", "error", reason=f"ValueError on rank {rank}: bad") for rank, cell in enumerate("ab")]
    found = one(list(rules.failures(tables(trials=rows))))
    assert (found.cell_id, found.others, found.n) == ("a", ("b",), 2)
    other = trial("c1", "error", reason="ValueError on rank 0: worse")
    assert len(list(rules.failures(tables(trials=[*rows, other])))) == 2


def test_errors_of_the_doctor_are_failures_and_warnings_are_not() -> None:
    rows = [{"check": "loader", "severity": level, "seen": "slow"} for level in ("error", "warning", "note")]
    found = one(list(rules.failures(tables(findings=rows))))
    assert (found.code, found.subject, found.reasons) == ("preflight", "loader", ("slow",))


def test_a_run_that_lacks_trials_is_incomplete() -> None:
    found = one(list(rules.incomplete(tables(missing=[{"trial_id": "a"}, {"trial_id": "b"}]))))
    assert (found.topic, found.code, found.n) == ("incomplete", "missing", 2)


def test_cells_of_which_every_trial_failed_make_a_run_incomplete() -> None:
    timed = {"kind": "throughput"}
    rows = [
        trial("a1", "error", **timed),
        trial("a2", "ok", **timed),
        trial("b1", "oom", **timed),
        trial("b2", "error", **timed),
        trial("c1", "skipped", skip_code="doctor", **timed),
        trial("d1", "error", kind="diagnostic"),
        trial("e1", "skipped", skip_code="too_few_devices", **timed),
    ]
    found = one(list(rules.incomplete(tables(trials=rows))))
    assert (found.code, found.cell_id, found.others, found.n) == ("failed", "b", ("c",), 2)


def test_a_run_that_a_limit_ended_is_incomplete() -> None:
    rows = [trial("a1", "skipped", skip_code="time_up"), trial("b1", "skipped", skip_code="time_up")]
    found = one(list(rules.incomplete(tables(trials=rows))))
    assert (found.code, found.n, found.reasons) == ("time_up", 2, ("because of skipped",))


def test_a_run_with_a_result_of_every_cell_is_complete() -> None:
    rows = [trial("a1", "ok", kind="throughput"), trial("b1", "skipped", skip_code="precise", kind="throughput")]
    assert list(rules.incomplete(tables(trials=rows))) == []


def test_devices_that_the_machine_lacks_are_open_and_other_skips_are_not() -> None:
    rows = [
        trial("a1", "skipped", skip_code="too_few_devices", devices=8),
        trial("b1", "skipped", skip_code="too_few_devices", devices=4),
        trial("c1", "skipped", skip_code="precise", devices=2),
    ]
    found = one(list(rules.open_questions(tables(trials=rows))))
    assert (found.code, found.n, found.subject) == ("too_few_devices", 2, "4, 8")


def test_what_memory_left_out_is_open_and_what_no_machine_can_run_is_not() -> None:
    rows = [
        trial("a1", "skipped", skip_code="time_up", devices=8),
        trial("b1", "skipped", skip_code="out_of_memory", devices=8),
        trial("c1", "skipped", skip_code="strategy_devices", devices=2),
    ]
    found = one(list(rules.open_questions(tables(trials=rows))))
    assert (found.code, found.n, found.reasons) == ("out_of_memory", 1, ("because of skipped",))


@pytest.mark.parametrize("rule", [rules.equivalence, rules.failures, rules.incomplete, rules.open_questions])
def test_nothing_is_said_of_empty_tables(rule: Callable[[Tables], Any]) -> None:
    assert list(rule(Tables({}))) == []
