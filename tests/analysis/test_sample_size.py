"""The number of blocks, determined once by the pilot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.sample_size import needed_blocks
from harness.config.experiment import Experiment
from harness.config.sections import BlockRule
from harness.plan.planner import Plan, make_plan
from harness.record.rows import trial_columns
from tests.conftest import laptop

Make = Callable[..., Experiment]
RULE = BlockRule(at_least=3, at_most=12, halfwidth=0.1)


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    rule = {"at_least": 3, "at_most": 12, "halfwidth": 0.1}
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    return make_plan(make_experiment(grid, throughput={"blocks": rule}), laptop())


def lines_of(plan: Plan, speed: Callable[[str, int, int], float], blocks: int = 3) -> list[dict[str, Any]]:
    """Return the trials of the first blocks with throughput ``speed(strategy, devices, block)``."""
    return [
        {
            **trial_columns(trial),
            "invocation": 0,
            "outcome": "ok",
            "windows": [
                {
                    "window_kind": "timed",
                    "window": 0,
                    "duration_s": 1.0,
                    "weight": speed(trial.cell.strategy, trial.cell.devices, trial.block),
                }
            ],
        }
        for trial in plan.trials
        if trial.block < blocks
    ]


def by_name(plan: Plan, needed: dict[str, int]) -> dict[str, int]:
    return {f"{t.cell.strategy}{t.cell.devices}": needed[t.cell.id] for t in plan.trials}


def test_steady_ratios_need_the_pilot_alone_however_far_blocks_drift(plan: Plan) -> None:
    lines = lines_of(plan, lambda strategy, devices, block: 100.0 * devices * (1 + block))
    assert by_name(plan, needed_blocks(plan.trials, lines, RULE)) == {"single1": 3, "ddp1": 3, "ddp2": 3}


def test_a_noisy_cell_needs_more_blocks_and_so_do_its_base_and_wrapper_cell(plan: Plan) -> None:
    def speed(strategy: str, devices: int, block: int) -> float:
        return 100.0 * math.exp(0.06 * (block - 1) * (devices == 2))

    # s0 = 0.06, t = 4.3027, d = log(1.1): (4.3027 * 0.06 / 0.09531)^2 = 7.34
    assert by_name(plan, needed_blocks(plan.trials, lines_of(plan, speed), RULE)) == {
        "single1": 8,
        "ddp1": 8,
        "ddp2": 8,
    }


def test_max_blocks_is_the_upper_bound(plan: Plan) -> None:
    def speed(strategy: str, devices: int, block: int) -> float:
        return 100.0 * math.exp(1.0 * block * (devices == 2))

    assert by_name(plan, needed_blocks(plan.trials, lines_of(plan, speed), RULE))["ddp2"] == 12


def test_later_blocks_do_not_change_it(plan: Plan) -> None:
    quiet = lines_of(plan, lambda strategy, devices, block: 100.0)
    wild = lines_of(plan, lambda strategy, devices, block: 100.0 * (1 + block * devices), blocks=12)
    later = [line for line in wild if line["block"] >= 3]
    assert needed_blocks(plan.trials, quiet + later, RULE) == needed_blocks(plan.trials, quiet, RULE)


def test_a_cell_without_a_pilot_takes_all_blocks(plan: Plan) -> None:
    lines = [line for line in lines_of(plan, lambda *_: 100.0) if line["devices"] == 1]
    assert by_name(plan, needed_blocks(plan.trials, lines, RULE))["ddp2"] == 12


def test_a_base_without_cells_uses_the_precision_of_its_own_speed(make_experiment: Make) -> None:
    plan = make_plan(make_experiment({"per_device_batch_size": 8}, throughput={"blocks": RULE.model_dump()}), laptop())
    lines = lines_of(plan, lambda strategy, devices, block: 100.0 * math.exp(0.06 * (block - 1)))
    assert set(needed_blocks(plan.trials, lines, RULE).values()) == {8}
