"""The partners of a cell: the cells that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.config.axes import AXES, CELL_AXES
from harness.plan.comparison import (
    axes_of,
    base_cell,
    base_cells,
    equivalence_cell,
    explaining_cells,
    other_launcher_cells,
    partner_ids,
    set_ids,
    single_device_cell,
    wrapped_single_device_cell,
)
from tests.plan.test_cell import CELL


def test_a_base_keeps_the_batch_that_the_scaling_holds_fixed() -> None:
    base = base_cell(CELL)
    assert (base.strategy, base.devices, base.nodes) == ("single", 1, 1)
    assert (base.per_device_batch_size, base.global_batch_size) == (8, 8)
    assert base.strategy_options == {} and base.optimizer == CELL.optimizer and base_cell(base) == base
    strong = base_cell(CELL.at_global_batch_size(64))
    assert (strong.scaling, strong.per_device_batch_size, strong.global_batch_size) == ("strong", 64, 64)


def test_diagnostic_cells_train_alike_and_the_check_drops_batch_dependent_options() -> None:
    training = {"accumulation": 4, "lr_scaling": "linear", "lr_base_batch_size": 8, "clip_grad_norm": 1.0}
    cell = replace(CELL, training=training)
    assert cell.micro_batches == 4
    for alike in (single_device_cell, wrapped_single_device_cell, base_cell):
        assert alike(cell).training == training
    check = equivalence_cell(cell, 8)
    assert check.training == {"clip_grad_norm": 1.0}
    assert (check.micro_batches, check.lr_factor) == (1, 1.0)


def test_an_indivisible_global_batch_is_compared_in_a_check_only() -> None:
    uneven = CELL.at_global_batch_size(30)
    assert set(partner_ids(uneven).values()) == {None}
    assert partner_ids(uneven, equivalence=True)["base_id"] == base_cell(uneven).id
    assert base_cells([uneven, CELL, CELL]) == {base_cell(CELL): None}


def test_wrappers_of_ranks_on_several_devices_are_explained_on_one() -> None:
    dp, fsdp = (replace(CELL, strategy=name, strategy_options={}) for name in ("dp", "fsdp"))
    assert set(explaining_cells([CELL])) == {single_device_cell(CELL), wrapped_single_device_cell(CELL)}
    assert set(explaining_cells([fsdp])) == {single_device_cell(fsdp), wrapped_single_device_cell(fsdp)}
    assert set(explaining_cells([dp, base_cell(dp)])) == {single_device_cell(dp)}


def test_the_partners_of_a_cell_have_its_variant_and_the_control_the_other_launcher() -> None:
    after = replace(CELL, variant="after", code="1")
    assert base_cell(after) == replace(base_cell(CELL), variant="after", code="1")
    assert other_launcher_cells(CELL) == [replace(CELL, launcher="torchrun")]
    assert other_launcher_cells(replace(CELL, launcher="torchrun")) == [CELL]


def ids(**changes: Any) -> dict[str, str | None]:
    return set_ids(axes_of(replace(CELL, **changes)))


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"devices": 2, "nodes": 1, "global_batch_size": 16}, {"family_id"}),
        ({"device_ids": (0, 1, 2, 3)}, {"family_id"}),
        ({"per_device_batch_size": 16, "global_batch_size": 64}, set()),
        ({"launcher": "torchrun"}, {"launchers_id"}),
        ({"strategy": "fsdp", "strategy_options": {"reshard_after_forward": True}}, set()),
        ({"strategy_options": {"bucket_cap_mb": 1}}, set()),
        ({"optimizer": {"name": "SGD", "lr": 0.2}}, set()),
        ({"precision": "bf16"}, set()),
        ({"oversubscribed": True}, set()),
        ({"variant": "after", "code": "1"}, set()),
    ],
)
def test_cells_of_a_set_differ_in_one_thing(changes: dict[str, Any], shared: set[str]) -> None:
    assert {name for name, value in ids(**changes).items() if value == ids()[name]} == shared


def test_under_strong_scaling_a_family_shares_the_global_batch() -> None:
    strong = CELL.at_global_batch_size(64)
    half = replace(strong, devices=2, nodes=1).at_global_batch_size(64)
    assert set_ids(axes_of(strong))["family_id"] == set_ids(axes_of(half))["family_id"]
    assert set_ids(axes_of(strong))["family_id"] != ids()["family_id"]


def test_every_axis_of_the_tables_is_the_cells_but_its_nodes_link_and_what_trials_found() -> None:
    assert set(AXES) - {"link", "faulty", "ingest"} == set(CELL_AXES) == set(axes_of(CELL))
