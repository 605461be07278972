"""Products, lists, exclusions, bases; and the one cell of each published figure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.errors import ExperimentError
from harness.plan.cell import Cell
from harness.plan.grid import Cells, device_counts, expand
from harness.plan.inventory import resolve
from harness.plan.planner import make_plan
from tests.conftest import experiment_of, gpu_cluster, laptop, plan_of, variants

SIZES = ["resnet8", "resnet14"]


def cells_of(experiment: Experiment, inventory: Any = None) -> Cells:
    machine = resolve(inventory or gpu_cluster(), request=experiment.device, device_counts=device_counts(experiment))
    return expand(experiment, machine)


def points(cells: tuple[Cell, ...], *axes: str) -> list[tuple[Any, ...]]:
    return [tuple(cell.axis(axis) for axis in axes) for cell in cells]


def test_a_grid_is_a_product_in_the_order_of_the_file_and_divides_a_global_batch() -> None:
    grid = {"strategy": ["dp", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    assert points(cells_of(experiment_of(grid)).asked, *grid) == [*product(*grid.values())]
    experiment = experiment_of({"strategy": "ddp", "devices": [1, 2, 3], "global_batch_size": 64})
    batches = points(cells_of(experiment).asked, "devices", "per_device_batch_size", "global_batch_size")
    assert batches == [(1, 64, 64), (2, 32, 64), (3, None, 64)]


def test_each_combination_of_the_other_axes_has_its_base_added_if_the_grid_lacks_it() -> None:
    lacking = experiment_of({"strategy": "ddp", "devices": [1, 2], "per_device_batch_size": 8})
    assert points(cells_of(lacking).added, "strategy", "devices") == [("single", 1)]
    holding = experiment_of({"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8})
    assert cells_of(holding).added == ()
    experiment = experiment_of(
        {"model": SIZES, "strategy": "ddp", "devices": 2, "precision": ["fp32", "bf16"], "global_batch_size": 64}
    )
    bases = points(cells_of(experiment).added, "model", "precision", "per_device_batch_size")
    assert bases == [(model, precision, 64) for model in SIZES for precision in ("fp32", "bf16")]


def test_a_list_of_cells_joins_the_grid_and_a_cell_that_stands_twice_is_one() -> None:
    more = [{"strategy": "ddp", "devices": 4, "per_device_batch_size": 16}, {"per_device_batch_size": 32}]
    asked = cells_of(experiment_of(cells=more)).asked
    assert points(asked, "strategy", "devices", "per_device_batch_size") == [("single", 1, 32), ("ddp", 4, 16)]


def test_exclude_removes_cells_that_match_every_axis_of_a_rule_but_not_all_cells() -> None:
    grid = {"strategy": ["ddp", "fsdp"], "devices": [1, 2], "per_device_batch_size": 8}
    experiment = experiment_of(grid, exclude=[{"strategy": "fsdp", "devices": 1}])
    assert points(cells_of(experiment).asked, "strategy", "devices") == [("ddp", 1), ("ddp", 2), ("fsdp", 2)]
    rules = [{"strategy": "fsdp"}, {"strategy": "dpp"}, {"ddp.bucket_cap": 25}]
    assert cells_of(experiment_of(grid, exclude=rules)).unmatched == tuple(rules[1:])
    with pytest.raises(ExperimentError, match="exclude leaves no cell"):
        cells_of(experiment_of(exclude=[{"strategy": "single"}]))


FOUR_THOUSAND = list(range(1, 4001))
MANY_CELLS, RULE = {"per_device_batch_size": FOUR_THOUSAND}, {"at_most": 500, "halfwidth": 0.1}
TOO_LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"throughput": {"blocks": 1000}}, "4000 cells in 1000 blocks are 4000000 trials; at most 30000"),
    "a rule for blocks": ({"throughput": {"blocks": RULE}}, "4000 cells in 500 blocks are 2000000 trials"),
    "seeds": ({"convergence": {"epochs": 1, "seeds": FOUR_THOUSAND}}, "1 blocks and 4000 seeds are 16004000 trials"),
    "option axes": ({"optimizer": {"name": "SGD", "lr": FOUR_THOUSAND}}, "the grid has 16000000 cells; at most 12000"),
    "launchers and cells": (
        {"launcher": ["ray", "torchrun"], "cells": [MANY_CELLS] * 3},
        "the grid has 32000 cells; at most 12000",
    ),
    "long options": ({"workload_options": {"x": [FOUR_THOUSAND]}}, "values of options"),
    "a long text": ({"workload_options": {"x": "x" * 90_000}}, "values of options"),
    "exclusions": (
        {"exclude": [{"devices": FOUR_THOUSAND}]},
        "4000 values to look for in 4000 cells are 16000000 comparisons; at most 5000000",
    ),
    "convergence.only": ({"convergence": {"epochs": 1, "only": {"devices": FOUR_THOUSAND}}}, "16000000 comparisons"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_grid_that_is_too_large_is_refused_before_expansion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sections, message = TOO_LARGE[name]
    experiment = experiment_of(MANY_CELLS, **{"throughput": {"blocks": 1}, **sections})
    monkeypatch.setattr("harness.plan.grid.Cell", None)  # nothing is made of it
    with pytest.raises(ExperimentError, match=message):
        cells_of(experiment)


def test_option_lists_are_axes_and_the_grid_overrides_them() -> None:
    experiment = experiment_of(
        {"per_device_batch_size": 8, "optimizer.lr": [0.5]},
        optimizer={"name": "SGD", "lr": [0.1, 0.2], "momentum": [0.0, 0.9]},
        workload_options={"width": 8},
    )
    asked = cells_of(experiment).asked
    assert points(asked, "optimizer.lr", "optimizer.momentum", "workload.width") == [(0.5, 0.0, 8), (0.5, 0.9, 8)]


def test_a_list_inside_a_list_is_a_value_and_a_key_of_an_option_may_have_a_dot() -> None:
    sections = {"schedule": {"name": "MultiStepLR", "milestones": [[1, 2]]}, "workload_options": {"no.such": 5}}
    (cell,) = cells_of(experiment_of(optimizer={"name": "SGD", "foo.bar": 3}, **sections)).asked
    assert cell.schedule == {"name": "MultiStepLR", "milestones": [1, 2]}
    assert cell.optimizer == {"name": "SGD", "foo.bar": 3} and cell.workload_options == {"no.such": 5}


def test_strategy_options_belong_to_their_strategy_alone() -> None:
    grid = {"strategy": ["single", "ddp"], "per_device_batch_size": 8}
    asked = cells_of(experiment_of(grid, strategy_options={"ddp": {"bucket_cap_mb": [1, 25]}})).asked
    assert points(asked, "strategy", "ddp.bucket_cap_mb") == [("single", None), ("ddp", 1), ("ddp", 25)]


def test_built_in_defaults_are_named_and_a_users_own_are_not() -> None:
    axes = ("data", "model", "variant", "code")
    assert points(cells_of(experiment_of()).asked, *axes) == [("digits", "resnet18", None, None)]
    assert points(cells_of(experiment_of(workload="mine:Own")).asked, *axes) == [(None, None, None, None)]


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [("ddp", {8: 1, 16: 2, 32: 4, 12: 2, 64: 1}), ("dp", {16: 1})],  # by devices
)
def test_nodes_are_the_fewest_that_hold_the_devices(strategy: str, nodes: dict[int, int]) -> None:
    experiment = experiment_of({"strategy": strategy, "devices": [*nodes], "per_device_batch_size": 8})
    assert {cell.devices: cell.nodes for cell in cells_of(experiment, gpu_cluster(nodes=4)).asked} == nodes
    asked = experiment_of({"strategy": "fsdp", "devices": 8, "nodes": 4, "per_device_batch_size": 8})
    assert cells_of(asked, gpu_cluster(nodes=4)).asked[0].nodes == 4


def test_only_cells_that_do_not_fit_are_oversubscribed() -> None:
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2, 4], "per_device_batch_size": 8}
    asked = cells_of(experiment_of(grid, oversubscribe=True), laptop()).asked
    shared = [(cell.strategy, cell.devices) for cell in asked if cell.oversubscribed]
    assert shared == [("dp", 4), ("ddp", 4)]


VARIANTS = {"workload": "own:Own", "variants": {"before": "/code/before", "after": "/code/after"}}


def test_variants_are_an_axis_with_the_hash_of_their_code_and_can_be_excluded() -> None:
    grid = {"strategy": "ddp", "devices": [1, 2], "per_device_batch_size": 8}
    experiment = experiment_of(grid, exclude=[{"variant": "before", "devices": 2}], **VARIANTS)
    machine = resolve(gpu_cluster(), request="auto", device_counts=(1, 2))
    cells = expand(experiment, machine, variants=variants("before", "after"))
    before, after = ("before", "0" * 12), ("after", "0" * 11 + "1")
    assert points(cells.asked, "devices", "variant", "code") == [(1, *before), (1, *after), (2, *after)]
    assert points(cells.added, "strategy", "variant") == [("single", "before"), ("single", "after")]


def test_each_variant_has_the_traits_of_its_own_strategy() -> None:
    experiment = experiment_of({"strategy": "own:Mine", "per_device_batch_size": 8}, variants=VARIANTS["variants"])
    traits = {name: replace(BUILTIN_TRAITS["ddp"], emulated_on_cpu=name == "after") for name in ("before", "after")}
    alike = {name: own._replace(traits={"own:Mine": traits[name]}) for name, own in variants(*traits).items()}
    machine = resolve(laptop(), request="auto", device_counts=(1,))
    cells = expand(experiment, machine, variants=alike).asked
    assert [(cell.variant, cell.emulated) for cell in cells] == [("before", False), ("after", True)]


MANY = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16], "optimizer.lr": [0.1, 0.01]}
ONE = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8, "optimizer.lr": 0.1}


def entry(metric: str = "step_s", **cell: Any) -> dict[str, Any]:
    return {"metric": metric, "value": 1, "cell": cell, "source": "A. Author", "hardware": "2 X100"}


def test_a_figure_of_one_cell_changes_no_id() -> None:
    plain, given = experiment_of(MANY), experiment_of(MANY, published=[entry(**ONE)])
    ids = [[trial.id for trial in make_plan(each, laptop()).trials] for each in (plain, given)]
    assert ids[0] == ids[1]
    make_plan(given, gpu_cluster())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({**ONE, "devices": 4}, "which 0 of the 16 cells match; allowed: axes of the grid"),
        ({"strategy": "ddp", "devices": 2}, f"which 4 of the 16 cells match ({'ddp x2, batch 16; ' * 2}ddp x2"),
    ],
)
def test_no_cell_or_several_are_bad_input(cell: dict[str, Any], message: str) -> None:
    experiment = experiment_of(MANY, exclude=[], published=[entry(**ONE), entry(**cell)])
    with pytest.raises(ExperimentError) as caught:
        make_plan(experiment, laptop())
    assert "published[1].cell: got " in str(caught.value) and message in str(caught.value)


def test_figures_of_epochs_need_trainings_and_are_of_their_batch() -> None:
    experiment = experiment_of(MANY, published=[entry("val_loss", **ONE)])
    with pytest.raises(ExperimentError, match=r"published\[0\].metric: val_loss needs the section convergence"):
        make_plan(experiment, laptop())
    settings = {"epochs": 1, "seeds": 0, "global_batch_size": 32, "only": {"optimizer.lr": 0.1}}
    trained = entry("val_loss", strategy="ddp", devices=2, global_batch_size=32)
    plan_of(MANY, published=[trained], convergence=settings)


def test_loader_workers_that_the_file_leaves_open_are_none_on_a_cpu_and_the_data_sets_beside_a_gpu() -> None:
    """On a CPU a cell has the id of one whose file says 0; on GPUs the same id whatever their cores."""
    for inventory, workers in ((laptop(), 0), (gpu_cluster(), None)):
        (cell,) = {
            trial.cell for trial in plan_of({"strategy": "single", "per_device_batch_size": 8}, inventory).trials
        }
        assert cell.loader["workers"] == workers
        explicit = plan_of({"strategy": "single", "per_device_batch_size": 8, "loader.workers": 0}, inventory)
        assert ({trial.cell.id for trial in explicit.trials} == {cell.id}) is (workers == 0)
