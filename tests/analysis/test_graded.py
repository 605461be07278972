"""The preview beside the run that followed, and the time that a run took by part."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.preview import preview, recorded_parts
from harness.record.estimate import Basis, Estimate, PartTime
from harness.record.frames import records
from tests.records import line

CELLS = ("single", "ddp2")


def environment(**last: Any) -> Any:
    """One invocation of 100 s with two worker groups of 30 s each."""
    groups = [
        {"group_id": f"b0-g{i}", "invocation": 0, "started_at": 0.0, "whole_s": 30.0, "placement": "p", "nodes": [1]}
        for i in range(2)
    ]
    return {"invocations": [{"started_at": 0.0, "wall_s": 100.0, **last}], "groups": groups}


LINES: list[dict[str, Any]] = [
    {**one, "device_ids": None}
    for one in (
        line("single", trial_s=4.0),
        line("ddp2", rates=(100.0, 100.0), trial_s=6.0, group_id="b0-g1"),
        line("single", trial_s=5.0, kind="diagnostic", purpose="twin", trial_id="single-b0t"),
        line("ddp2", rates=(100.0, 100.0), trial_s=None, outcome="skipped", block=1),
    )
]


def part(name: str, seconds: float | None, basis: Basis = "earlier run", **more: Any) -> PartTime:
    known: Any = {"cell_id": None, "label": name, "trials": 1, "seconds": seconds, "device_s": seconds, **more}
    return PartTime(name, basis=basis, **known)


def rest_of(groups: float, command: float, report: float | None = None, trials: int = 2) -> list[PartTime]:
    """The parts beside the cells: the twin took 5 s."""
    parts = [part("twin", 5.0), part("worker groups", groups, trials=trials), part("command", command, trials=0)]
    return parts if report is None else [*parts, part("report", report, trials=0)]


def estimate(*parts: PartTime) -> Estimate:
    return Estimate("results/x/y", 2, 2, "about", [*parts])


def used(lines: list[dict[str, Any]], of_run: Any) -> dict[tuple[str, str | None], PartTime]:
    every = [{**one, "device_ids": None} for one in lines]
    return {(part.part, part.cell_id): part for part in recorded_parts(every, of_run, 2)}


def test_the_parts_of_a_run_add_up_to_its_wall_time_and_a_trial_that_is_tried_again_counts_once() -> None:
    found = used(LINES, environment(report_s=8.0))
    assert {key: (use.trials, use.seconds, use.device_s) for key, use in found.items()} == {
        ("cell", "single"): (1, 4.0, 4.0),
        ("cell", "ddp2"): (1, 6.0, 12.0),
        ("twin", None): (1, 5.0, 5.0),
        ("worker groups", None): (2, 45.0, 0.0),
        ("command", None): (0, 40.0, 0.0),
        ("report", None): (0, 8.0, 0.0),
    }
    again = [line("single", trial_s=4.0, outcome="lost"), line("single", trial_s=5.0, attempt=2)]
    use = used(again, environment())["cell", "single"]
    assert (use.trials, use.seconds) == (1, 9.0)


def test_energy_is_known_where_power_is_and_ranks_that_share_a_device_occupy_it_once() -> None:
    powered = line("ddp2", rates=(1.0, 1.0), trial_s=6.0)
    for rank in powered["ranks"]:
        rank["power_w"] = 300.0
    found = used([powered, line("single", trial_s=4.0)], environment())
    assert found["cell", "ddp2"].energy_j == 300 * 2 * 6
    assert found["cell", "single"].energy_j is None
    assert used([line("ddp8", devices=8, trial_s=6.0)], environment())["cell", "ddp8"].device_s == 12.0


def rows(known: Estimate | None, **last: Any) -> dict[str, dict[str, Any]]:
    frame = preview(known, 2, LINES, environment(**last))
    return {str(row["label"]): row for row in records(frame)}


def test_each_part_has_its_estimate_and_what_it_took() -> None:
    known = estimate(
        part("cell", 5.0, cell_id="single", label="single x1"),
        part("cell", 8.0, cell_id="ddp2", label="ddp x2", trials=2),
        *rest_of(50.0, 30.0, 10.0),
    )
    found = rows(known, report_s=8.0)
    single = found["single x1"]
    assert (single["estimated_s"], single["actual_s"], single["error"]) == (5.0, 4.0, 0.25)
    assert single["device_hours"] == pytest.approx(4 * 2 / 3600)
    assert single["busy_device_hours"] == pytest.approx(4 / 3600)
    ddp = found["ddp x2"]
    assert (ddp["planned_trials"], ddp["measured_trials"], ddp["error"]) == (2, 1, None)
    until, total = found["until the report"], found["total"]
    assert (until["estimated_s"], until["actual_s"]) == (98.0, 100.0)
    assert (total["estimated_s"], total["actual_s"], total["error"]) == (108.0, 108.0, None), "a trial was left out"
    named = ["single x1", "ddp x2", "twin", "worker groups", "command", "until the report", "report", "total"]
    assert [*found] == named


def test_the_total_has_an_error_if_every_planned_trial_was_started() -> None:
    found = rows(estimate(*(part("cell", 5.0, cell_id=name) for name in CELLS), *rest_of(35.0, 40.0, trials=3)))
    assert found["until the report"]["error"] == pytest.approx(-0.1)
    assert found["total"]["actual_s"] is None, "the time of the report is not known while it is written"


def test_of_several_invocations_trials_alone_have_an_error() -> None:
    twice = environment(report_s=8.0)
    twice["invocations"] *= 2
    known = estimate(*(part("cell", 5.0, cell_id=name) for name in CELLS), *rest_of(35.0, 40.0, 8.0))
    for of_run, outside in ((twice, [None] * 4), (environment(report_s=8.0), [35 / 45 - 1, 0.0, 0.0, -10 / 108])):
        found = {row["part"]: row["error"] for row in records(preview(known, 2, LINES, of_run))}
        assert (found["cell"], found["twin"]) == (pytest.approx(-1 / 6), 0.0)
        for name, error in zip(("worker groups", "command", "report", "total"), outside, strict=True):
            assert found[name] == (None if error is None else pytest.approx(error)), name


def test_a_lower_bound_has_no_error_and_an_unknown_time_none() -> None:
    known = estimate(part("cell", 3.0, "lower bound", cell_id="single"), part("cell", None, "unknown", cell_id="ddp2"))
    found = records(preview(known, 2, LINES, environment()))
    assert [(row["estimated_s"], row["error"]) for row in found[:2]] == [(3.0, None), (None, None)]
    assert found[-1]["basis"] == "lower bound"


@pytest.mark.parametrize(
    ("basis", "total"), [("earlier run", "unknown"), ("lower bound", "lower bound"), ("unknown", "unknown")]
)
def test_a_sum_with_an_unknown_part_is_a_lower_bound_only_if_another_part_is(basis: Basis, total: str) -> None:
    """An earlier run may have been slower: its times are no bound."""
    known = estimate(part("cell", 200.0, basis, cell_id="single"), part("report", None, "unknown", trials=0))
    found = records(preview(known, 2))
    assert (found[-1]["basis"], found[-1]["error"]) == (total, None)


def test_without_an_estimate_there_is_what_it_took_and_before_the_run_only_the_estimate() -> None:
    found = rows(None, report_s=8.0)
    assert found["total"]["actual_s"] == 108.0 and found["total"]["estimated_s"] is None
    assert found["A/A test of the base"]["actual_s"] == 5.0
    assert {row["basis"] for row in found.values()} == {None}
    found = records(preview(estimate(part("cell", 5.0, cell_id="single")), 4))
    assert [(row["estimated_s"], row["actual_s"], row["measured_trials"]) for row in found] == [(5.0, None, None)] * 3
    assert found[0]["device_hours"] == pytest.approx(5 * 4 / 3600)
    assert len(preview(estimate(), 4)) == 0
