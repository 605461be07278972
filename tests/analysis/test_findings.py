"""Findings that compare the examinations of several cells."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.findings import findings
from tests.records import line, steps_of


def examined(strategy: str, distinct: int | None, **columns: Any) -> dict[str, Any]:
    facts = {"findings": [], "figures": {}} | ({} if distinct is None else {"distinct_samples": distinct})
    options = columns.pop("options", {"workload.width": 8, "optimizer.lr": 0.1})
    return line(
        f"{strategy}2", strategy=strategy, kind="diagnostic", purpose="doctor", facts=facts, options=options, **columns
    )


def found(*lines: dict[str, Any]) -> list[tuple[str, str]]:
    table = findings([*lines], trial_tables.trials([*lines], steps_of([*lines])))  # type: ignore[list-item]
    return list(zip(table["strategy"], table["seen"], strict=True))


def test_a_strategy_that_reads_fewer_samples_than_one_device_is_a_finding() -> None:
    seen = found(examined("single", 1000), examined("ddp", 500), examined("fsdp", 1000))
    assert seen == [("ddp", "distinct samples in an epoch: 500; of one device: 1,000")]


@pytest.mark.parametrize(
    ("single", "ddp"),
    [
        (examined("single", 1000), examined("ddp", 1000)),
        (examined("single", None), examined("ddp", 500)),
        (examined("single", 1000), examined("ddp", None)),
        (examined("single", 1000, data="a"), examined("ddp", 500, data="b")),
        (examined("single", 1000), examined("ddp", 500, options={"workload.width": 16})),
    ],
    ids=["equal", "unknown of one device", "unknown", "other data", "other options"],
)
def test_other_examinations_are_not_compared(single: dict[str, Any], ddp: dict[str, Any]) -> None:
    assert found(single, ddp) == []


def test_the_learning_rate_has_no_part_in_the_data() -> None:
    swept = examined("ddp", 500, options={"workload.width": 8, "optimizer.lr": 0.01})
    assert len(found(examined("single", 1000), swept)) == 1
