"""A cell's identity is its content."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from harness.plan.cell import Cell

CELL = Cell(
    workload="image_classification",
    data="digits",
    model="resnet18",
    strategy="ddp",
    device="cpu",
    devices=4,
    nodes=2,
    scaling="weak",
    per_device_batch_size=8,
    global_batch_size=32,
    strategy_options={"bucket_cap_mb": 25},
    optimizer={"name": "SGD", "lr": 0.1},
)

OTHER: dict[str, Any] = {
    "workload": "a:B",
    "data": None,
    "model": "resnet34",
    "strategy": "fsdp",
    "device": "cuda",
    "devices": 2,
    "nodes": 1,
    "scaling": "strong",
    "per_device_batch_size": None,
    "global_batch_size": 64,
    "precision": "bf16",
    "compile": True,
    "oversubscribe": True,
    "launcher": "torchrun",
    "device_ids": (4, 5, 6, 7),
    "strategy_options": {"bucket_cap_mb": 1},
    "workload_options": {"width": 3},
    "optimizer": {"name": "SGD", "lr": 0.2},
    "schedule": {"name": "ConstantLR"},
    "training": {"accumulation": 2},
    "loader": {"workers": 1},
}


@pytest.mark.parametrize("name", [field.name for field in fields(Cell) if field.compare])
def test_every_field_changes_the_id(name: str) -> None:
    assert replace(CELL, **{name: OTHER[name]}).id != CELL.id


def test_the_id_does_not_depend_on_the_order_of_options() -> None:
    one = replace(CELL, optimizer={"lr": 0.1, "name": "SGD"})
    assert one.id == CELL.id
    assert one == CELL
    assert len({one, CELL}) == 1


def test_the_id_stays_the_same_between_versions() -> None:
    assert CELL.id == Cell(**{field.name: getattr(CELL, field.name) for field in fields(Cell)}).id
    assert len(CELL.id) == 12


def test_a_global_batch_that_does_not_divide_is_not_changed() -> None:
    cell = CELL.at_global_batch_size(30)
    assert (cell.global_batch_size, cell.per_device_batch_size) == (30, None)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ({}, True),
        ({"strategy": "ddp"}, True),
        ({"strategy": ["dp", "ddp"], "devices": 4}, True),
        ({"strategy": "ddp", "devices": 2}, False),
        ({"optimizer.lr": 0.1}, True),
        ({"optimizer.lr": [0.2]}, False),
        ({"fsdp.reshard_after_forward": True}, False),
        ({"ddp.bucket_cap_mb": 25}, True),
    ],
)
def test_filters(wanted: dict[str, Any], matches: bool) -> None:
    assert CELL.matches(wanted) is matches


def test_dataparallel_on_a_cpu_is_emulated() -> None:
    assert replace(CELL, strategy="dp").emulated
    assert not replace(CELL, strategy="dp", device="cuda").emulated
    assert not CELL.emulated


def test_the_label_names_the_axes() -> None:
    assert CELL.label == "ddp x4 on 2 nodes · resnet18 · batch 8/device · fp32"
    assert replace(CELL, launcher="torchrun").label == f"{CELL.label} · torchrun"
    assert CELL.at_global_batch_size(64).label == "ddp x4 on 2 nodes · resnet18 · global batch 64 · fp32"


@pytest.mark.parametrize(
    ("scaling", "factor"), [({}, 1.0), ({"lr_scaling": "linear"}, 2.0), ({"lr_scaling": "sqrt"}, 2.0**0.5)]
)
def test_the_rate_follows_the_global_batch(scaling: dict[str, Any], factor: float) -> None:
    cell = replace(CELL, training={"lr_base_batch_size": 16, **scaling})
    assert cell.lr_factor == factor
    assert cell.at_global_batch_size(16).lr_factor == 1.0
