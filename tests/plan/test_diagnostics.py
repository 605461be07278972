"""Twins, what explains a cell, and the checks: which trials are added, and where."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan.cell import Cell, place
from harness.plan.comparison import base_cell
from harness.plan.diagnostics import seconds_of_links
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, filter_plan, make_plan, single_rank_only
from harness.record.lines import trial_columns
from tests.conftest import experiment_of, gpu_cluster, laptop, plan_of

WEAK = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
STRONG = {"strategy": "ddp", "devices": [2, 4], "global_batch_size": 64}


def cells_for(purpose: str, plan: Plan) -> list[Cell]:
    return [trial.cell for trial in plan.trials if trial.purpose == purpose]


def test_every_block_has_a_twin_of_every_base_in_other_processes() -> None:
    plan = plan_of(WEAK, diagnostics=True, throughput={"blocks": 3})
    twins = [trial for trial in plan.trials if trial.purpose == "twin"]
    assert len(twins) == 3 * 2
    for group in plan.groups:
        places = {trial: set(group.ranks_of(trial)) for trial in group.trials}
        pairs = [(a, b) for a in places for b in places if a.purpose == "twin" and a.cell == b.cell and a != b]
        assert pairs and not any(places[twin] & places[base] for twin, base in pairs)
    assert all(trial.cell == base_cell(trial.cell) for trial in twins)


@pytest.mark.parametrize(
    ("grid", "machine", "more", "expected"),
    [
        ({}, laptop(4), {}, {("resnet18", 16, block) for block in range(5)}),  # the largest batch
        ({"devices": [1]}, laptop(4), {}, set()),  # which has all threads
        ({}, laptop(4), {"throughput": {"blocks": 2}}, {("resnet18", 16, 0), ("resnet18", 16, 1)}),
        ({}, laptop(4), {"throughput": {"blocks": 2, "twin": False}}, set()),
        ({}, Inventory.assume(1, 4, 32), {}, set()),
    ],
)
def test_a_base_on_a_cpu_is_measured_with_the_threads_of_all_slots_too(
    grid: dict[str, Any], machine: Inventory, more: dict[str, Any], expected: set[tuple[str, int, int]]
) -> None:
    asked = {"diagnostics": True, "throughput": {"blocks": 8}, **more}
    found = [trial for trial in plan_of({**WEAK, **grid}, machine, **asked).trials if trial.purpose == "threads"]
    assert {(str(t.cell.model), t.cell.global_batch_size, t.block) for t in found} == expected
    assert {(t.threads, t.cell.devices, t.cell.strategy) for t in found} <= {(4, 1, "single")}
    assert all(trial.timed and trial.repeats and trial.scenario == "throughput" for trial in found)


def test_cells_that_explain_are_those_missing_from_the_grid_at_the_smaller_batch() -> None:
    assert cells_for("explain", plan_of(WEAK, diagnostics=True, throughput={"blocks": 1})) == []
    plan = plan_of({**WEAK, "devices": [2], "strategy": "ddp"}, diagnostics=True)
    assert {(cell.strategy, cell.devices) for cell in cells_for("explain", plan)} == {("ddp", 1)}
    plan = plan_of(STRONG, gpu_cluster(), diagnostics=True, throughput={"blocks": 1})
    explaining = {(cell.strategy, cell.devices, cell.global_batch_size) for cell in cells_for("explain", plan)}
    assert explaining == {("single", 1, 32), ("ddp", 1, 32), ("single", 1, 16), ("ddp", 1, 16)}


def test_each_strategy_and_device_count_is_checked_once_in_the_first_block() -> None:
    plan = plan_of(WEAK, diagnostics=True, throughput={"blocks": 3})
    checks = [trial for trial in plan.trials if trial.purpose == "equivalence"]
    checked = {(t.cell.strategy, t.cell.devices, t.cell.global_batch_size, t.block) for t in checks}
    assert checked == {("single", 1, 8, 0), ("ddp", 1, 8, 0), ("ddp", 2, 8, 0)}


def test_checks_open_their_group_epochs_and_links_follow_and_profiles_close_it() -> None:
    """The profiler may stay attached to the process and slow the timed windows, or epochs, that follow."""
    grid = {**WEAK, "strategy": ["single", "dp", "ddp", "fsdp"]}
    plan = plan_of(grid, diagnostics=True, throughput={"blocks": 2}, convergence={"epochs": 1})
    for group in plan.groups:
        turns = {"doctor": -2, "equivalence": -1, "threads": 0, "links": 2, "profile": 3}
        ranks = [turns.get(t.purpose, int(t.kind == "convergence")) for t in group.trials]
        assert ranks == sorted(ranks)
    profiled = [(t.cell.strategy, t.cell.per_device_batch_size, t.block) for t in plan.trials if t.purpose == "profile"]
    assert sorted(profiled) == [(name, b, k) for name in ("dp", "fsdp") for b in (8, 16) for k in (0, 1)]
    assert not [t for t in single_rank_only(plan).trials if t.purpose == "profile"], "one process has all groups"


def test_on_gpus_every_cell_is_profiled_once_for_the_time_in_which_the_gpu_is_busy() -> None:
    grid = {"strategy": ["single", "ddp", "fsdp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = plan_of(grid, gpu_cluster(), diagnostics=True, throughput={"blocks": 2})
    profiled = sorted((t.cell.strategy, t.cell.devices, t.block) for t in plan.trials if t.purpose == "profile")
    once = [("ddp", 1, 0), ("ddp", 2, 0), ("fsdp", 1, 0), ("single", 1, 0)]
    assert profiled == sorted([*once, ("fsdp", 2, 0), ("fsdp", 2, 1)])


def test_of_a_sweep_the_extremes_are_examined() -> None:
    plan = plan_of({**WEAK, "optimizer.lr": [0.1, 0.05, 0.001, 30]}, preflight=True)
    examined = cells_for("doctor", plan)
    rates = sorted((cell.strategy, cell.devices, cell.optimizer["lr"]) for cell in examined)
    assert rates == [("ddp", 1, 0.1), ("ddp", 2, 0.001), ("ddp", 2, 30), ("single", 1, 0.001), ("single", 1, 30)]
    labels = {plan.labels.of_cell(cell) for cell in examined}
    assert {label for label in labels if "lr=30" in label} and len(labels) == len(examined)


@pytest.mark.parametrize(
    ("precisions", "checked"), [(["fp32", "tf32"], ["fp32"]), (["fp32", "bf16"], ["bf16", "fp32"])]
)
def test_checks_ignore_the_batch_and_keep_precisions_of_16_bits(precisions: list[str], checked: list[str]) -> None:
    plan = plan_of({**WEAK, "precision": precisions}, gpu_cluster(gpus=2), diagnostics=True, throughput={"blocks": 1})
    checks = cells_for("equivalence", plan)
    assert sorted({cell.precision for cell in checks}) == checked
    timed = [t for t in plan.trials if t.kind == "throughput"]
    ids = {t.check_id for t in timed if t.cell.strategy == "ddp" and t.cell.devices == 2}
    assert len(ids) == len(checked) and ids < {cell.id for cell in checks}
    assert {t.check_id for t in plan.trials if t.cell.strategy == "single"} == {None}


def test_a_training_has_a_check_even_without_throughput_cells() -> None:
    section = {"epochs": 1, "global_batch_size": 32}
    plan = plan_of(WEAK, diagnostics=True, convergence=section)
    checks = {cell.id: cell for cell in cells_for("equivalence", plan)}
    trainings = [t for t in plan.trials if t.kind == "convergence" and t.cell.strategy == "ddp"]
    assert trainings
    for training in trainings:
        check = checks[str(training.check_id)]
        assert (check.strategy, check.devices) == (training.cell.strategy, training.cell.devices)
    alone = plan_of(WEAK, diagnostics=True, throughput=None, convergence=section)
    assert {t.check_id for t in alone.trials if t.kind == "convergence" and t.cell.strategy == "ddp"} <= set(checks)
    assert cells_for("equivalence", alone)


def test_only_keeps_diagnostic_trials_of_its_cells() -> None:
    whole = plan_of(WEAK, diagnostics=True, throughput={"blocks": 1})
    part = filter_plan(whole, {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8})
    seen = {(t.cell.strategy, t.cell.devices, t.cell.global_batch_size, t.purpose) for t in part.trials}
    measured = {("ddp", 2, 16, ""), ("ddp", 1, 8, ""), ("single", 1, 8, ""), ("single", 1, 8, "twin")}
    checks = {("ddp", 2, 8, "equivalence"), ("single", 1, 8, "equivalence"), ("ddp", 2, 16, "links")}
    assert seen == measured | checks


def test_links_are_measured_once_a_placement_of_several_devices_in_the_first_block() -> None:
    grid = {"strategy": ["dp", "ddp", "fsdp"], "devices": [1, 2, 4], "per_device_batch_size": [8, 16]}
    experiment = experiment_of(grid, diagnostics=True, throughput={"blocks": 2})
    for machine, placements in ((laptop(4), [(2, 1), (4, 1)]), (gpu_cluster(), [(1, 2), (1, 4), (2, 1), (4, 1)])):
        groups = [g for g in make_plan(experiment, machine).groups if any(t.purpose == "links" for t in g.trials)]
        measured = [place(t.cell) for group in groups for t in group.trials if t.purpose == "links"]
        found = [(placement.workers, placement.devices_per_worker) for placement in measured]
        assert sorted(found) == placements
        assert {group.block for group in groups} == {0}
        orders = [[t.purpose for t in group.trials] for group in groups]
        assert all(set(order[order.index("links") + 1 :]) <= {"links", "profile"} for order in orders)


TWO = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8}
FSDP = {"grid": {**TWO, "strategy": "fsdp"}}
PAIRS = {"grid": {"strategy": ["ddp", "fsdp"], "device_ids": [[0, 1], [2, 3]], "per_device_batch_size": 8}}
BACKENDS = {"grid": {**TWO, "ddp.backend": ["auto", "nccl", "gloo"]}}
LAUNCHERS = {"launcher": ["torchrun", "ray"]}


@pytest.mark.parametrize(
    ("purpose", "sections", "inventory", "axis", "values"),
    [
        ("links", PAIRS, gpu_cluster(), "device_ids", [(0, 1), (2, 3)]),
        ("links", BACKENDS, gpu_cluster(), "backend", ["auto", "gloo"]),
        ("links", BACKENDS, laptop(), "backend", ["auto"]),
        ("links", {"grid": WEAK, "oversubscribe": True}, laptop(1), "devices", []),  # devices that ranks share
        ("links", {"grid": WEAK, **LAUNCHERS}, laptop(), "launcher", ["ray"]),
        ("profile", {**FSDP, **LAUNCHERS}, laptop(), "launcher", ["ray"]),
        ("profile", {**FSDP, "launcher": ["torchrun"]}, laptop(), "launcher", ["torchrun"]),
    ],
)
def test_which_cells_have_a_diagnostic_trial(
    purpose: str, sections: dict[str, Any], inventory: Inventory, axis: str, values: list[object]
) -> None:
    plan = plan_of(inventory=inventory, diagnostics=True, throughput={"blocks": 1}, **sections)
    assert sorted(getattr(cell, axis) for cell in cells_for(purpose, plan)) == values


@pytest.mark.parametrize(
    ("settings", "sections", "purposes"),
    [
        ({"twin": False}, {}, {"twin"}),
        ({"explain": False}, {"equivalence": False}, {"explain", "profile", "links", "equivalence"}),
        ({"links_seconds": 0}, {}, {"links"}),
    ],
)
def test_what_the_file_switches_off_is_not_planned(
    settings: dict[str, object], sections: dict[str, object], purposes: set[str]
) -> None:
    grid = {**STRONG, "strategy": ["ddp", "fsdp"]}
    whole = plan_of(grid, gpu_cluster(), diagnostics=True)
    plan = plan_of(grid, gpu_cluster(), diagnostics=True, throughput=settings, **sections)
    assert {t.purpose for t in whole.trials} - {t.purpose for t in plan.trials} == purposes


def test_links_take_five_seconds_on_gpus_one_on_cpu_slots_or_what_the_file_says() -> None:
    default = experiment_of().throughput
    chosen = experiment_of(throughput={"links_seconds": 7}).throughput
    assert default and chosen
    assert [seconds_of_links(default, device) for device in ("cuda", "cpu")] == [5.0, 1.0]
    assert [seconds_of_links(chosen, device) for device in ("cuda", "cpu")] == [7.0, 7.0]


def test_a_check_whose_batch_does_not_divide_is_still_compared() -> None:
    grid = {"strategy": "ddp", "devices": [1, 3], "per_device_batch_size": 8}
    plan = plan_of(grid, laptop(4), diagnostics=True, throughput={"blocks": 1})
    rows = [trial_columns(t) for t in plan.trials if t.purpose == "equivalence" and t.cell.devices == 3]
    assert rows[0]["per_device_batch_size"] is None
    assert rows[0]["base_id"] in {cell.id for cell in cells_for("equivalence", plan)}
