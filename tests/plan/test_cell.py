"""A cell's identity is its content."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from harness.plan.cell import Cell, why_none
from harness.plan.comparison import axes_of, set_ids

OPTIONS: dict[str, Any] = {"strategy_options": {"bucket_cap_mb": 25}, "optimizer": {"name": "SGD", "lr": 0.1}}
CELL = Cell("image_classification", "digits", "resnet18", "ddp", "cpu", 4, 2, "weak", 8, 32, **OPTIONS)
OTHER = Cell("a:B", None, "resnet34", "fsdp", "cuda", 2, 1, "strong", None, 64, "bf16", True, True, "torchrun", (4, 5))
OTHER = replace(OTHER, strategy_options={"bucket_cap_mb": 1}, workload_options={"width": 3}, uneven=True)
OTHER = replace(OTHER, optimizer={"name": "SGD", "lr": 0.2}, schedule={"name": "ConstantLR"}, loader={"workers": 1})
OTHER = replace(
    OTHER, training={"accumulation": 2}, activation_checkpointing="full", variant="after", code="0123456789ab"
)
OTHER = replace(OTHER, compile_mode="reduce-overhead")
OTHER = replace(OTHER, env={"NCCL_ALGO": "Ring"})
"""A cell that differs in every field."""


@pytest.mark.parametrize("name", [field.name for field in fields(Cell) if field.compare])
def test_every_field_changes_the_id(name: str) -> None:
    assert getattr(OTHER, name) != getattr(CELL, name)
    assert replace(CELL, **{name: getattr(OTHER, name)}).id != CELL.id


def test_the_id_does_not_depend_on_the_order_of_options() -> None:
    one = replace(CELL, optimizer={"lr": 0.1, "name": "SGD"})
    assert one.id == CELL.id and len(CELL.id) == 12
    assert one == CELL
    assert len({one, CELL}) == 1


def test_ids_are_those_of_earlier_versions() -> None:
    assert CELL.id == "fe33aa95d875"
    assert set_ids(axes_of(CELL)) == {"family_id": "7ea4cf97f407", "launchers_id": "ae635038324b"}
    other = set_ids(axes_of(replace(CELL, activation_checkpointing="full")))
    assert CELL.options.keys() == {"optimizer.name", "optimizer.lr", "ddp.bucket_cap_mb"}
    assert not {*other.values()} & {*set_ids(axes_of(CELL)).values()}


MATCHING = [{}, {"strategy": "ddp"}, {"strategy": ["dp", "ddp"], "devices": 4}, {"optimizer.lr": 0.1}]
MATCHING += [{"ddp.bucket_cap_mb": 25}, {"devices": [[2, 4]]}, {"compile": [[True, False]]}]
OTHERS = [{"strategy": "ddp", "devices": 2}, {"optimizer.lr": [0.2]}, {"fsdp.reshard_after_forward": True}]
OTHERS += [{"devices": [[1, 2], 3]}, {"compile": 0}]


@pytest.mark.parametrize(("several", "matches"), [(MATCHING, True), (OTHERS, False)], ids=["matching", "others"])
def test_filters(several: list[dict[str, Any]], matches: bool) -> None:
    assert [wanted for wanted in several if CELL.matches(wanted) is not matches] == []


def test_what_no_cell_matches_is_explained_by_the_values_of_the_cells() -> None:
    cells = [CELL, replace(CELL, strategy="single", devices=1)]
    assert why_none(cells, {"devices": [True]}) == "devices: got [true]; its cells have 1, 4"
    assert why_none(cells, {"strategy": "dp", "devices": 1}) == 'strategy: got "dp"; its cells have "ddp", "single"'
    both = {"strategy": "single", "devices": 4}
    assert why_none(cells, both) == 'it has each of {"strategy": "single", "devices": 4}, but not in one cell'
    many = [replace(CELL, devices=n) for n in range(1, 40)]
    assert why_none(many, {"devices": 99}).endswith("17, 18, 19, 20")


def test_dataparallel_on_a_cpu_is_emulated_and_layers_that_wait_are_on_any_device() -> None:
    assert replace(CELL, strategy="dp").emulated
    assert not replace(CELL, strategy="dp", device="cuda").emulated
    assert not CELL.emulated and not axes_of(CELL)["emulated_compute"]
    for device in ("cpu", "cuda"):
        waiting = replace(CELL, workload="emulated_compute", device=device)
        assert waiting.emulated and axes_of(waiting)["emulated_compute"]


@pytest.mark.parametrize(
    ("scaling", "factor"), [({}, 1.0), ({"lr_scaling": "linear"}, 2.0), ({"lr_scaling": "sqrt"}, 2.0**0.5)]
)
def test_the_rate_follows_the_global_batch(scaling: dict[str, Any], factor: float) -> None:
    cell = replace(CELL, training={"lr_base_batch_size": 16, **scaling})
    assert cell.lr_factor == factor
    assert cell.at_global_batch_size(16).lr_factor == 1.0
