"""The number of blocks, determined once by the pilot."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.sample_size import needed_blocks
from harness.analysis.stats import geometric_mean
from harness.config.sections import BlockRule
from harness.plan.planner import Plan, make_plan
from harness.record.lines import trial_columns
from tests.conftest import Make, laptop

STUDY = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
RULE = BlockRule(at_least=3, at_most=12, halfwidth=0.1)


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {**STUDY, "strategy": ["single", "ddp"]}
    return make_plan(make_experiment(grid, throughput={"blocks": RULE.model_dump()}), laptop())


def lines_of(plan: Plan, speed: Callable[[str, int, int], float], blocks: int = 3) -> list[dict[str, Any]]:
    """Return the trials of the first blocks with throughput ``speed(strategy, devices, block)``."""
    window = {"window_kind": "timed", "window": 0, "rank": 0, "steps": 1, "duration_s": 1.0}
    done = {"invocation": 0, "outcome": "ok", "facts": {}, "ranks": [{"rank": 0, "device_model": "H100"}]}
    return [
        {**trial_columns(trial), **done, "windows": [{**window, "weight": speed(cell.strategy, cell.devices, block)}]}
        for trial in plan.trials
        for cell, block in ((trial.cell, trial.block),)
        if block < blocks
    ]


def with_noise(lines: list[dict[str, Any]], **columns: str) -> list[dict[str, Any]]:
    """Return the lines; those with these columns vary by 6 % from block to block."""
    for one in lines:
        if columns.items() <= one.items():
            one["windows"][0]["weight"] *= math.exp(0.06 * (one["block"] - 1))
    return lines


def by_name(plan: Plan, needed: dict[str, int]) -> dict[str, int]:
    return {f"{t.cell.strategy}{t.cell.devices}": needed[t.cell.id] for t in plan.trials}


@pytest.mark.parametrize(
    ("speed", "blocks"),
    [
        (lambda _, devices, block: 100.0 * devices * (1 + block), 3),
        # s0 = 0.06, t = 4.3027, d = log(1.1): (4.3027 * 0.06 / 0.09531)^2 = 7.34
        (lambda _, devices, block: 100.0 * math.exp(0.06 * (block - 1) * (devices == 2)), 8),
        (lambda _, devices, block: 100.0 * math.exp(1.0 * block * (devices == 2)), 12),
    ],
    ids=["steady ratios, however far blocks drift", "a noisy cell", "as many as the rule allows"],
)
def test_a_noisy_cell_needs_more_blocks_and_so_do_its_base_and_wrapper_cell(
    plan: Plan, speed: Callable[[str, int, int], float], blocks: int
) -> None:
    needed = by_name(plan, needed_blocks(plan.trials, lines_of(plan, speed), RULE, 3))
    assert needed == {"single1": blocks, "ddp1": blocks, "ddp2": blocks}


@pytest.mark.parametrize("kept", [{"ranks": [{"rank": 0, "device_model": "A100"}]}, {"facts": {"inline": True}}])
def test_blocks_that_form_no_ratio_are_no_pilot(plan: Plan, kept: dict[str, Any]) -> None:
    lines = lines_of(plan, lambda _, devices, block: 100.0 * devices)
    assert set(needed_blocks(plan.trials, lines, RULE, 3).values()) == {3}
    for line in (line for line in lines if line["devices"] == 2):
        line.update(kept)
    assert by_name(plan, needed_blocks(plan.trials, lines, RULE, 3))["ddp2"] == 12


def test_a_noisy_ratio_of_two_strategies_needs_more_blocks(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(STUDY, throughput={"blocks": RULE.model_dump()}), laptop())

    def speed(strategy: str, devices: int, block: int) -> float:
        return 100.0 * math.exp(0.03 * (block - 1) * {"dp": 1, "ddp": -1}.get(strategy, 0) * (devices == 2))

    needed = by_name(plan, needed_blocks(plan.trials, lines_of(plan, speed), RULE, 3))
    # s0 of each ratio to the base is 0.03: 3 blocks; of ddp to dp 0.06: 8, as above
    assert (needed["dp2"], needed["ddp2"], needed["single1"]) == (8, 8, 8)


def test_one_cell_under_two_launchers_is_judged_by_its_ratio_not_by_drift(make_experiment: Make) -> None:
    throughput = {"blocks": RULE.model_dump(), "twin": False}
    plan = make_plan(make_experiment(launcher=["ray", "torchrun"], throughput=throughput), laptop())
    lines = lines_of(plan, lambda strategy, devices, block: 100.0 * (1 + block))
    assert set(needed_blocks(plan.trials, lines, RULE, 3).values()) == {3}
    assert set(needed_blocks(plan.trials, with_noise(lines, launcher="torchrun"), RULE, 3).values()) == {8}


def test_a_noisy_twin_needs_more_blocks(make_experiment: Make) -> None:
    throughput = {"blocks": RULE.model_dump(), "twin": True}
    plan = make_plan(make_experiment({**STUDY, "strategy": ["single", "ddp"]}, throughput=throughput), laptop())
    lines = with_noise(lines_of(plan, lambda *_: 100.0), purpose="twin")
    needed = by_name(plan, needed_blocks(plan.trials, lines, RULE, 3))
    assert (needed["single1"], needed["ddp2"]) == (8, 3)


def test_every_ratio_is_within_the_halfwidth_in_simulated_studies(make_experiment: Make) -> None:
    """Cells that vary by 3 to 5 % in blocks that drift by 10 %, 100 studies: AUDIT.md B7 had 23 % for ddp to dp."""
    rule = BlockRule(at_least=3, at_most=100, halfwidth=0.05)
    plan = make_plan(make_experiment(STUDY, throughput={"blocks": rule.model_dump()}), laptop())
    draws = random.Random(7)
    cells = {f"{t.cell.strategy}{t.cell.devices}": t.cell.id for t in plan.trials}
    lines = lines_of(plan, lambda *_: 1.0)
    for _ in range(100):
        speeds = [{name: math.exp(draws.gauss(0, 0.04)) for name in cells} for _ in range(rule.at_most)]
        drift = [math.exp(draws.gauss(0, 0.1)) for _ in speeds]
        for one in lines:
            name = f"{one['strategy']}{one['devices']}"
            one["windows"][0]["weight"] = drift[one["block"]] * speeds[one["block"]][name]
        needed = needed_blocks(plan.trials, lines, rule, 3)
        for first, second in (("dp2", "single1"), ("ddp2", "single1"), ("ddp2", "dp2")):
            n = min(needed[cells[first]], needed[cells[second]], rule.at_most)
            ratios = [speeds[block][first] / speeds[block][second] for block in range(n)]
            ratio = geometric_mean(ratios, pilot=rule.at_least)
            assert n == rule.at_most or (ratio.halfwidth or 0.0) <= rule.halfwidth


def test_a_cell_without_a_pilot_takes_all_blocks_and_later_blocks_do_not_change_what_a_pilot_says(plan: Plan) -> None:
    quiet = lines_of(plan, lambda strategy, devices, block: 100.0)
    wild = lines_of(plan, lambda strategy, devices, block: 100.0 * (1 + block * devices), blocks=12)
    later = [line for line in wild if line["block"] >= 3]
    both = [needed_blocks(plan.trials, of, RULE, 3) for of in (quiet + later, quiet)]
    assert both[0] == both[1]
    lines = [line for line in quiet if line["devices"] == 1]
    assert by_name(plan, needed_blocks(plan.trials, lines, RULE, 3))["ddp2"] == 12


def test_a_base_without_cells_uses_the_precision_of_its_own_speed(make_experiment: Make) -> None:
    plan = make_plan(make_experiment({"per_device_batch_size": 8}, throughput={"blocks": RULE.model_dump()}), laptop())
    lines = lines_of(plan, lambda strategy, devices, block: 100.0 * math.exp(0.06 * (block - 1)))
    assert set(needed_blocks(plan.trials, lines, RULE, 3).values()) == {8}


@pytest.mark.parametrize(("environments", "blocks"), [(("a", "a"), 3), (("a", "b"), 12), ((None, None), 12)])
def test_a_pilot_that_was_cut_in_two_counts_the_pairs_that_the_ratio_has(
    plan: Plan, environments: tuple[str | None, str | None], blocks: int
) -> None:
    """Of each block the base is of the first invocation; without pairs nothing is known, and the most are measured."""
    lines = lines_of(plan, lambda strategy, devices, block: 100.0 * devices * (1 + block))
    cut = [
        line
        | {"invocation": int(line["strategy"] != "single"), "environment": environments[line["strategy"] != "single"]}
        for line in lines
    ]
    assert by_name(plan, needed_blocks(plan.trials, cut, RULE, 3))["ddp2"] == blocks


@pytest.mark.parametrize(
    ("faster", "noise", "blocks"),
    [
        (1.5, 0.02, 3),  # clear
        (1.0, 0.01, 3),  # about equal: within 5 % at 98 %
        (1.1, 0.06, 8),  # open
    ],
)
def test_a_look_ends_comparisons_that_are_clear_or_about_equal(
    make_experiment: Make, faster: float, noise: float, blocks: int
) -> None:
    grid = {**STUDY, "strategy": ["single", "ddp"]}
    plan = make_plan(make_experiment(grid, throughput={"blocks": "decide"}), laptop())
    assert {trial.block for trial in plan.trials if trial.kind == "throughput"} == set(range(8))

    def speed(strategy: str, devices: int, block: int) -> float:
        if devices == 2:
            return 100.0 * faster * math.exp(noise * (block - 1))
        return 100.0 if strategy == "single" else 50.0

    needed = by_name(plan, needed_blocks(plan.trials, lines_of(plan, speed), "decide", 3))
    assert needed["ddp2"] == needed["single1"] == blocks  # its base goes on with it


def test_a_base_counts_with_its_twin(make_experiment: Make) -> None:
    grid = {**STUDY, "strategy": ["single", "ddp"]}
    plan = make_plan(make_experiment(grid, throughput={"blocks": "decide", "twin": True}), laptop())
    lines = lines_of(plan, lambda strategy, devices, block: 200.0 if devices == 2 else 100.0)
    for one in lines:  # base and twin vary, their mean does not
        if one["strategy"] == "single":
            one["windows"][0]["weight"] *= math.exp((0.5 if one["purpose"] == "twin" else -0.5) * (one["block"] - 1))
    assert by_name(plan, needed_blocks(plan.trials, lines, "decide", 3))["ddp2"] == 3
    alone = [one for one in lines if one["purpose"] != "twin"]
    assert by_name(plan, needed_blocks(plan.trials, alone, "decide", 3))["ddp2"] == 8
