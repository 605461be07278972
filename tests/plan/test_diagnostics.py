"""Twins, what explains a cell, and the checks: which trials are added, and where."""

from __future__ import annotations

import pytest

from harness.plan.cell import place
from harness.plan.comparison import base_cell
from harness.plan.diagnostics import seconds_of_links
from harness.plan.inventory import Inventory
from harness.plan.planner import filter_plan, make_plan, single_rank_only
from harness.record.lines import trial_columns
from tests.conftest import Make, gpu_cluster, laptop

WEAK = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
STRONG = {"strategy": "ddp", "devices": [2, 4], "global_batch_size": 64}


def test_every_block_has_a_twin_of_every_base_in_other_processes(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(WEAK, diagnostics=True, throughput={"blocks": 3}), laptop())
    twins = [trial for trial in plan.trials if trial.purpose == "twin"]
    assert len(twins) == 3 * 2
    for group in plan.groups:
        places = {trial: set(group.ranks_of(trial)) for trial in group.trials}
        pairs = [(a, b) for a in places for b in places if a.purpose == "twin" and a.cell == b.cell and a != b]
        assert pairs and not any(places[twin] & places[base] for twin, base in pairs)
    assert all(trial.cell == base_cell(trial.cell) for trial in twins)


def test_weak_scaling_adds_only_diagnostic_cells_missing_from_the_grid(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(WEAK, diagnostics=True, throughput={"blocks": 1}), laptop())
    assert not [trial for trial in plan.trials if trial.purpose == "explain"]
    without = {**WEAK, "devices": [2]}
    plan = make_plan(make_experiment({**without, "strategy": "ddp"}, diagnostics=True), laptop())
    explaining = {(t.cell.strategy, t.cell.devices) for t in plan.trials if t.purpose == "explain"}
    assert explaining == {("ddp", 1)}


def test_strong_scaling_is_explained_by_one_device_at_the_smaller_batch(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(STRONG, diagnostics=True, throughput={"blocks": 1}), gpu_cluster())
    explaining = {
        (t.cell.strategy, t.cell.devices, t.cell.global_batch_size) for t in plan.trials if t.purpose == "explain"
    }
    assert explaining == {("single", 1, 32), ("ddp", 1, 32), ("single", 1, 16), ("ddp", 1, 16)}


def test_each_strategy_and_device_count_is_checked_once_in_the_first_block(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(WEAK, diagnostics=True, throughput={"blocks": 3}), laptop())
    checks = [trial for trial in plan.trials if trial.purpose == "equivalence"]
    assert {(t.cell.strategy, t.cell.devices, t.cell.global_batch_size, t.block) for t in checks} == {
        ("single", 1, 8, 0),
        ("ddp", 1, 8, 0),
        ("ddp", 2, 8, 0),
    }


def test_checks_open_their_group_epochs_and_links_follow_and_profiles_close_it(make_experiment: Make) -> None:
    """The profiler may stay attached to the process and slow the timed windows, or epochs, that follow."""
    grid = {**WEAK, "strategy": ["single", "dp", "ddp", "fsdp"]}
    experiment = make_experiment(grid, diagnostics=True, throughput={"blocks": 2}, convergence={"epochs": 1})
    plan = make_plan(experiment, laptop())
    for group in plan.groups:
        turns = {"doctor": -2, "equivalence": -1, "links": 2, "profile": 3}
        ranks = [turns.get(t.purpose, int(t.kind == "convergence")) for t in group.trials]
        assert ranks == sorted(ranks)
    profiled = [(t.cell.strategy, t.cell.per_device_batch_size, t.block) for t in plan.trials if t.purpose == "profile"]
    assert sorted(profiled) == [(name, b, k) for name in ("dp", "fsdp") for b in (8, 16) for k in (0, 1)]
    assert not [t for t in single_rank_only(plan).trials if t.purpose == "profile"], "one process has all groups"


def test_of_a_sweep_the_extremes_are_examined(make_experiment: Make) -> None:
    grid = {**WEAK, "optimizer.lr": [0.1, 0.05, 0.001, 30]}
    plan = make_plan(make_experiment(grid, preflight=True), laptop())
    examined = [t.cell for t in plan.trials if t.purpose == "doctor"]
    rates = [(cell.strategy, cell.devices, cell.optimizer["lr"]) for cell in examined]
    assert sorted(rates) == [
        ("ddp", 1, 0.1),
        ("ddp", 2, 0.001),
        ("ddp", 2, 30),
        ("single", 1, 0.001),
        ("single", 1, 30),
    ]
    labels = {plan.labels.of_cell(cell) for cell in examined}
    assert {label for label in labels if "lr=30" in label} and len(labels) == len(examined)


@pytest.mark.parametrize(
    ("precisions", "checked"), [(["fp32", "tf32"], ["fp32"]), (["fp32", "bf16"], ["bf16", "fp32"])]
)
def test_a_cells_check_is_independent_of_batch_and_runs_in_its_precision_if_that_has_16_bits(
    make_experiment: Make, precisions: list[str], checked: list[str]
) -> None:
    grid = {**WEAK, "precision": precisions}
    inventory = Inventory.assume(1, 2)
    plan = make_plan(make_experiment(grid, diagnostics=True, throughput={"blocks": 1}), inventory)
    assert sorted({t.cell.precision for t in plan.trials if t.purpose == "equivalence"}) == checked
    checks = {t.cell.id for t in plan.trials if t.purpose == "equivalence"}
    ids = {
        t.check_id for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "ddp" and t.cell.devices == 2
    }
    assert len(ids) == len(checked)
    assert ids < checks
    assert {t.check_id for t in plan.trials if t.cell.strategy == "single"} == {None}


def test_a_training_has_a_check_even_without_throughput_cells(make_experiment: Make) -> None:
    section = {"epochs": 1, "global_batch_size": 32}
    plan = make_plan(make_experiment(WEAK, diagnostics=True, convergence=section), laptop())
    checks = {t.cell.id: t.cell for t in plan.trials if t.purpose == "equivalence"}
    trainings = [t for t in plan.trials if t.kind == "convergence" and t.cell.strategy == "ddp"]
    assert trainings
    for training in trainings:
        check = checks[str(training.check_id)]
        assert (check.strategy, check.devices) == (training.cell.strategy, training.cell.devices)
    alone = make_plan(make_experiment(WEAK, diagnostics=True, throughput=None, convergence=section), laptop())
    assert {t.check_id for t in alone.trials if t.kind == "convergence" and t.cell.strategy == "ddp"} <= set(checks)
    assert [t for t in alone.trials if t.purpose == "equivalence"]


def test_only_keeps_diagnostic_trials_of_its_cells(make_experiment: Make) -> None:
    whole = make_plan(make_experiment(WEAK, diagnostics=True, throughput={"blocks": 1}), laptop())
    part = filter_plan(whole, {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8})
    seen = {(t.cell.strategy, t.cell.devices, t.cell.global_batch_size, t.purpose) for t in part.trials}
    assert seen == {
        ("ddp", 2, 16, ""),
        ("ddp", 1, 8, ""),
        ("single", 1, 8, ""),
        ("single", 1, 8, "twin"),
        ("ddp", 2, 8, "equivalence"),
        ("single", 1, 8, "equivalence"),
        ("ddp", 2, 16, "links"),
    }


def test_links_are_measured_once_a_placement_of_several_devices_in_the_first_block(make_experiment: Make) -> None:
    grid = {"strategy": ["dp", "ddp", "fsdp"], "devices": [1, 2, 4], "per_device_batch_size": [8, 16]}
    experiment = make_experiment(grid, diagnostics=True, throughput={"blocks": 2})
    for machine, placements in ((laptop(4), [(2, 1), (4, 1)]), (gpu_cluster(), [(1, 2), (1, 4), (2, 1), (4, 1)])):
        groups = [g for g in make_plan(experiment, machine).groups if any(t.purpose == "links" for t in g.trials)]
        measured = [place(t.cell) for group in groups for t in group.trials if t.purpose == "links"]
        found = [(placement.workers, placement.devices_per_worker) for placement in measured]
        assert sorted(found) == placements
        assert {group.block for group in groups} == {0}
        orders = [[t.purpose for t in group.trials] for group in groups]
        assert all(set(order[order.index("links") + 1 :]) <= {"links", "profile"} for order in orders)


LAUNCHERS = {"launcher": ["torchrun", "ray"]}
TWO = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8}
FSDP = {**TWO, "strategy": "fsdp"}


@pytest.mark.parametrize(
    ("purpose", "grid", "sections", "inventory", "axis", "values"),
    [
        (
            *("links", {"strategy": ["ddp", "fsdp"], "device_ids": [[0, 1], [2, 3]], "per_device_batch_size": 8}, {}),
            *(gpu_cluster(), "device_ids", [(0, 1), (2, 3)]),
        ),
        ("links", {**TWO, "ddp.backend": ["auto", "nccl", "gloo"]}, {}, gpu_cluster(), "backend", ["auto", "gloo"]),
        ("links", {**TWO, "ddp.backend": ["auto", "gloo"]}, {}, laptop(), "backend", ["auto"]),
        ("links", WEAK, {"oversubscribe": True}, laptop(1), "devices", []),  # devices that ranks share
        ("links", WEAK, LAUNCHERS, laptop(), "launcher", ["ray"]),
        ("profile", FSDP, LAUNCHERS, laptop(), "launcher", ["ray"]),
        ("profile", FSDP, {"launcher": ["torchrun"]}, laptop(), "launcher", ["torchrun"]),
    ],
)
def test_which_cells_have_a_diagnostic_trial(
    *,
    make_experiment: Make,
    purpose: str,
    grid: dict[str, object],
    sections: dict[str, object],
    inventory: Inventory,
    axis: str,
    values: list[object],
) -> None:
    plan = make_plan(make_experiment(grid, diagnostics=True, throughput={"blocks": 1}, **sections), inventory)
    assert sorted(getattr(t.cell, axis) for t in plan.trials if t.purpose == purpose) == values


@pytest.mark.parametrize(
    ("settings", "sections", "purposes"),
    [
        ({"twin": False}, {}, {"twin"}),
        ({"explain": False}, {"equivalence": False}, {"explain", "profile", "links", "equivalence"}),
        ({"links_seconds": 0}, {}, {"links"}),
    ],
)
def test_what_the_file_switches_off_is_not_planned(
    settings: dict[str, object], sections: dict[str, object], purposes: set[str], make_experiment: Make
) -> None:
    grid = {**STRONG, "strategy": ["ddp", "fsdp"]}
    whole = make_plan(make_experiment(grid, diagnostics=True), gpu_cluster())
    plan = make_plan(make_experiment(grid, diagnostics=True, throughput=settings, **sections), gpu_cluster())
    assert {t.purpose for t in whole.trials} - {t.purpose for t in plan.trials} == purposes


def test_links_take_five_seconds_on_gpus_one_on_cpu_slots_or_what_the_file_says(make_experiment: Make) -> None:
    default = make_experiment().throughput
    chosen = make_experiment(throughput={"links_seconds": 7}).throughput
    assert default and chosen
    assert [seconds_of_links(default, device) for device in ("cuda", "cpu")] == [5.0, 1.0]
    assert [seconds_of_links(chosen, device) for device in ("cuda", "cpu")] == [7.0, 7.0]


def test_a_check_whose_batch_does_not_divide_is_still_compared(make_experiment: Make) -> None:
    grid = {"strategy": "ddp", "devices": [1, 3], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, diagnostics=True, throughput={"blocks": 1}), laptop(4))
    rows = [trial_columns(t) for t in plan.trials if t.purpose == "equivalence" and t.cell.devices == 3]
    assert rows[0]["per_device_batch_size"] is None
    assert rows[0]["base_id"] in {t.cell.id for t in plan.trials if t.purpose == "equivalence"}
