"""Why a step is not shorter: every cause of a leading cell in one list, by size."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.common import Record
from harness.analysis.verdict import Statement
from harness.analysis.verdict.rules import causes
from tests.analysis.verdict.test_rules import tables

Part = tuple[str, float, float | None]


def causes_of(*parts: Part, waits: float | None = None, low: float | None = None) -> list[Statement]:
    """Return the causes of a cell with these parts (share, lower end), which waits for data for a share of its step."""
    rows = [
        {"cell_id": "a", "part": part, "share": share, "low": end, "high": None if end is None else 2 * share - end}
        for part, share, end in parts
    ]
    phases: dict[str, Any] = {"cell_id": "a", "waits": waits, "waits_low": low, "waits_high": low and 1.0, "blocks": 3}
    return causes(tables(waterfall=rows, phases=[phases]), [Record({"cell_id": "a"})])


def test_all_causes_are_one_list_by_size() -> None:
    found = causes_of(
        ("ideal", 0.1, 0.1),
        ("wrapper", 0.02, -0.1),
        ("exposed communication", 0.07, 0.01),
        ("rest", 0.05, None),
        waits=0.81,
        low=0.73,
    )
    assert [(one.subject, one.value, one.code) for one in found] == [
        ("waiting for data", 0.81, "clear"),
        ("exposed communication", 0.07, "clear"),
        ("rest", 0.05, "no interval"),
        ("wrapper", 0.02, "unclear"),
    ]
    assert (found[0].low, found[0].high, found[0].n, found[0].evidence) == (0.73, 1.0, 3, "figure-phases")


@pytest.mark.parametrize(("waits", "named"), [(0.1, [0.1]), (0.09, [0.06]), (None, [0.06])])
def test_the_wait_for_data_is_named_once_from_10_percent_as_a_whole(waits: float | None, named: list[float]) -> None:
    found = causes_of(("waiting for data", 0.06, 0.01), waits=waits, low=0.01)
    assert [one.value for one in found] == named


def test_a_single_device_waits_for_data_too() -> None:
    assert [one.subject for one in causes_of(waits=0.3, low=0.2)] == ["waiting for data"]
    assert causes_of(waits=0.05, low=0.01) == []


def test_gains_and_less_than_1_percent_are_no_causes() -> None:
    assert causes_of(("wrapper", -0.1, -0.2), ("slowest rank", 0.009, 0.001)) == []


def test_what_is_saved_stands_after_the_causes_with_which_it_adds_up() -> None:
    found = causes_of(
        ("wrapper", -0.1, -0.15), ("side by side", -0.02, -0.05), ("rest", -0.03, None), ("slowest rank", 0.9, 0.8)
    )
    assert [(one.subject, one.code) for one in found] == [
        ("slowest rank", "clear"),
        ("side by side", "unclear"),
        ("rest", "saved"),
        ("wrapper", "saved"),
    ]


def test_a_cell_that_does_not_lead_has_no_causes() -> None:
    assert (
        causes(tables(waterfall=[{"cell_id": "b", "part": "wrapper", "share": 0.5}]), [Record({"cell_id": "a"})]) == []
    )
