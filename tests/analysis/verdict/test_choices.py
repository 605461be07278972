"""The rule on choices: which pairs it states, and when it claims a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.common import Record
from harness.analysis.results import load
from harness.analysis.verdict import Statement
from harness.analysis.verdict.choices import FASTER, SLOWER, TOO_FEW, UNCLEAR, choices
from harness.config.experiment import Experiment
from harness.plan.cell import Cell
from tests.analysis.verdict.test_rules import one, tables
from tests.run_folders import make_run

PAIR = {"cell_id": "25", "other_id": "1", "axis": "ddp.bucket_cap_mb", "value": "25", "other_value": "1"}
RATIO = {"ratio": 1.2, "low": 1.1, "high": 1.3, "blocks": 5, "p_value": 0.01}
BUCKETS: dict[str, Any] = {**PAIR, **RATIO, "throughput_per_s": 120.0, "other_throughput_per_s": 100.0}


def stated(*rows: dict[str, Any], leading: str = "25") -> list[Statement]:
    return choices(tables(versus=[{**BUCKETS, **row} for row in rows]), [Record({"cell_id": leading})])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, FASTER),
        ({"ratio": 0.8}, SLOWER),
        ({"p_value": 0.2}, UNCLEAR),
        ({"p_value": None, "low": None, "high": None, "blocks": 2}, TOO_FEW),
    ],
)
def test_a_difference_is_claimed_by_its_p_value(change: dict[str, Any], code: str) -> None:
    found = one(stated(change))
    assert (found.code, found.cell_id, found.others) == (code, "25", ("1",))
    assert found.subject == "ddp.bucket_cap_mb 25 / 1"


@pytest.mark.parametrize(
    "change",
    [
        *({"axis": axis} for axis in ("devices", "strategy", "model")),
        *({"excluded": "not equivalent"}, {"faulty": True}, {"emulated": True}, {"ratio": None}),
    ],
    ids=str,
)
def test_sizes_strategies_and_pairs_without_a_claim_are_left_out(change: dict[str, Any]) -> None:
    assert stated(change) == [] and len(stated({})) == 1


def test_several_differences_are_adjusted() -> None:
    second = {"axis": "training.accumulation", "other_id": "2", "p_value": 0.03}
    assert [found.code for found in stated({"p_value": 0.03}, second)] == [UNCLEAR, UNCLEAR]
    assert [found.code for found in stated({"p_value": 0.01}, second)] == [FASTER, FASTER]


def test_the_cells_to_use_are_compared_not_others() -> None:
    slow = {"cell_id": "slow 25", "other_id": "slow 1"}
    assert one(stated({}, slow)).cell_id == "25"
    assert one(stated({}, slow, leading="slow 1")).cell_id == "slow 25"


def test_a_choice_that_the_cells_to_use_lack_is_stated_of_the_largest_pair() -> None:
    few = {"cell_id": "few 25", "devices": 2}
    assert one(stated(few, {}, leading="fsdp")).cell_id == "25"


@pytest.mark.parametrize(("gain", "code"), [(1.2, FASTER), (1.0, UNCLEAR)])
def test_the_bucket_question_is_answered(
    tmp_path: Path, make_experiment: Callable[..., Experiment], gain: float, code: str
) -> None:
    grid = {"strategy": ["ddp"], "devices": [2], "per_device_batch_size": 8, "ddp.bucket_cap_mb": [1, 25]}
    noise = [1.0, 1.02, 0.99, 1.01, 0.98]

    def rate(cell: Cell, block: int) -> float:
        large = dict(cell.options).get("ddp.bucket_cap_mb") == 25
        return 100 * (gain * noise[block] if large else noise[-block - 1])

    experiment = make_experiment(grid, throughput={"blocks": 5})
    found = load(make_run(tmp_path, experiment, rate)).verdict
    (row,) = found[found["topic"] == "choice"].to_dict("records")
    assert row["code"] == code and row["subject"] == "ddp.bucket_cap_mb 25 / 1"
