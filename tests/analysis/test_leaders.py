"""The fastest setting of each group, and which settings cannot be told apart from it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.equivalence import Verdict
from harness.analysis.ratios import leaders
from tests.records import line, steps_of


def trials_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    return trial_tables.trials(lines, steps_of(lines))


def setting(cell: str, rates: list[float], **columns: Any) -> list[dict[str, Any]]:
    """Return the trials of a setting on two devices, a throughput a block."""
    columns = {"strategy": "ddp", "check_id": f"check-{cell}", **columns}
    return [line(cell, block=block, rates=(rate / 2, rate / 2), **columns) for block, rate in enumerate(rates)]


def rows_by_cell(lines: list[dict[str, Any]], **options: Any) -> dict[str, dict[str, Any]]:
    frame = leaders(trials_of(lines), **options)
    return {row["cell_id"]: row for row in frame.to_dict("records")}


def test_the_fastest_leads_and_a_slower_one_is_told_apart() -> None:
    found = rows_by_cell([*setting("a", [100, 101, 102, 100]), *setting("b", [50, 51, 50, 50.5])])
    assert found["a"]["leader_id"] == found["b"]["leader_id"] == "a"
    assert found["a"]["ratio"] == 1 and pd.isna(found["a"]["tied"])
    assert found["b"]["ratio"] == pytest.approx(0.5, abs=0.01) and found["b"]["tied"] is False
    assert found["b"]["high"] < 1


def test_settings_within_the_noise_are_tied() -> None:
    found = rows_by_cell([*setting("a", [100, 110, 90, 105]), *setting("b", [104, 92, 101, 99])])
    assert found["b"]["tied"] is True and found["b"]["p_value"] > 0.05


def test_many_settings_raise_the_bar() -> None:
    """One comparison of this size is significant by itself, and is not among eight (Holm)."""
    leader, near = [100.0, 102.0, 101.0, 100.0], [97.0, 100.5, 96.5, 98.5]
    alone = rows_by_cell([*setting("a", leader), *setting("b", near)])
    others = [one for number in range(8) for one in setting(f"c{number}", [near[(at + number) % 4] for at in range(4)])]
    among = rows_by_cell([*setting("a", leader), *setting("b", near), *others])
    assert alone["b"]["tied"] is False
    assert among["b"]["tied"] is True and among["b"]["p_value"] > alone["b"]["p_value"]


def test_a_setting_that_is_faster_in_the_blocks_that_both_have_leads() -> None:
    """Its mean is lower, since it alone was measured in three slow blocks."""
    found = rows_by_cell([*setting("a", [200, 200, 200]), *setting("b", [210, 211, 209.5, 100, 100, 100])])
    assert {row["leader_id"] for row in found.values()} == {"b"}
    assert found["a"]["ratio"] < 1 and found["a"]["tied"] is False


def test_settings_whose_workloads_differ_are_not_compared() -> None:
    cells = [setting(name, [rate] * 3, options={"workload.width": rate}) for name, rate in (("a", 100), ("b", 50))]
    found = rows_by_cell([one for cell in cells for one in cell])
    assert found["a"]["leader_id"] == "a" and found["b"]["leader_id"] == "b"


def test_two_blocks_decide_nothing() -> None:
    found = rows_by_cell([*setting("a", [100, 100]), *setting("b", [50, 50])])
    assert found["b"]["ratio"] == pytest.approx(0.5) and pd.isna(found["b"]["tied"])


@pytest.mark.parametrize(
    "columns",
    [
        {"model": "other"},
        {"data": "other"},
        {"precision": "bf16"},
        {"global_batch_size": 40},
        {"devices": 4, "global_batch_size": 20},
    ],
)
def test_other_questions_are_other_groups(columns: dict[str, Any]) -> None:
    found = rows_by_cell([*setting("a", [100] * 3), *setting("b", [50] * 3, **columns)])
    assert found["b"]["leader_id"] == "b" and found["b"]["settings"] == 1


@pytest.mark.parametrize("columns", [{"emulated": True}, {"oversubscribed": True}])
def test_rehearsals_do_not_compete(columns: dict[str, Any]) -> None:
    assert set(rows_by_cell([*setting("a", [100] * 3), *setting("b", [500] * 3, **columns)])) == {"a"}


def test_a_setting_that_is_not_equivalent_does_not_compete() -> None:
    lines = [*setting("a", [100] * 3), *setting("b", [500] * 3)]
    assert set(rows_by_cell(lines, checked={"check-b": Verdict("not equivalent", "it differs")})) == {"a"}


def test_the_control_under_torchrun_is_no_setting() -> None:
    lines = [*setting("a", [100] * 3), *setting("b", [500] * 3, launcher="torchrun")]
    assert set(rows_by_cell(lines)) == {"a"}
    assert set(rows_by_cell(setting("b", [500] * 3, launcher="torchrun"))) == {"b"}  # it alone was measured


def test_nothing_measured_is_an_empty_table() -> None:
    assert leaders(trials_of([line("a", outcome="oom")])).empty
