"""Which cells are compared along which axis."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan.cell import Cell
from harness.plan.comparison import axes_of, axis_pairs, natural, value_text, varying_axes

CELL = Cell("mlp", "digits", "resnet8", "ddp", "cpu", 2, 1, "weak", 32, 64, optimizer={"lr": 0.1})


def cell(**axes: Any) -> dict[str, Any]:
    return {**axes_of(CELL), **axes}


def pairs_of(*cells: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(pair.axis, pair.value, pair.other_value) for pair in axis_pairs((one, None) for one in cells)]


def test_equal_cells_and_two_launchers_make_no_pair() -> None:
    assert pairs_of(cell(), cell(), cell(launcher="torchrun")) == []


def test_options_of_strategies_leave_other_strategies_out() -> None:
    cells = [cell(options={"ddp.bucket_cap_mb": size}) for size in (1, 25)]
    fsdp = cell(strategy="fsdp", options={"fsdp.mesh": "hybrid"})
    assert pairs_of(*cells, fsdp) == [("strategy", "fsdp", "ddp")] * 2 + [("ddp.bucket_cap_mb", "25", "1")]


def test_every_placement_is_compared_with_the_first_of_the_file() -> None:
    cells = [cell(device_ids=ids) for ids in ("0,4", "5,6", "6,7", "10,11")]
    pairs = axis_pairs(((one, None) for one in cells), ("6,7", "5,6", "0,4", "10,11"))
    assert [(pair.value, pair.other_value) for pair in pairs] == [("5,6", "6,7"), ("0,4", "6,7"), ("10,11", "6,7")]
    first = [("device_ids", value, "0,4") for value in ("5,6", "6,7", "10,11")]
    assert pairs_of(*cells) == first


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        ("precision", ["bf16", "fp32", "tf32"], [("tf32", "fp32"), ("bf16", "tf32"), ("bf16", "fp32")]),
        ("model", ["resnet14", "resnet8"], [("resnet14", "resnet8")]),
        ("compile", [True, False], [("true", "false")]),
        ("nodes", [2, 1], [("2", "1")]),
        ("device_ids", ["0,1", "0,4"], [("0,4", "0,1")]),
        ("data", [None, "digits"], [("digits", "unset")]),
    ],
)
def test_neighbours_and_both_ends_are_compared(axis: str, values: list[Any], expected: list[tuple[str, str]]) -> None:
    assert pairs_of(*(cell(**{axis: value}) for value in values)) == [(axis, *pair) for pair in expected]


@pytest.mark.parametrize("lonely", [{"strategy": "single", "devices": 1}, {"strategy": "fsdp", "devices": 1}])
def test_strategies_are_compared_on_several_devices(lonely: dict[str, Any]) -> None:
    one = cell(**lonely, global_batch_size=32)
    assert [pair for pair in pairs_of(one, cell(devices=1, global_batch_size=32)) if pair[0] == "strategy"] == []


def test_devices_take_nodes_and_the_batch_along_and_a_batch_the_other_one() -> None:
    weak = [cell(per_device_batch_size=size, global_batch_size=2 * size) for size in (32, 64)]
    strong = [cell(scaling="strong", per_device_batch_size=size, global_batch_size=2 * size) for size in (32, 64)]
    assert pairs_of(*weak) == [("per_device_batch_size", "64", "32")]
    assert pairs_of(*strong) == [("global_batch_size", "128", "64")]
    assert {axis for axis, *_ in pairs_of(*weak, *strong)} == {"per_device_batch_size", "global_batch_size"}
    cells = [cell(devices=8, global_batch_size=256), cell(devices=16, nodes=2, global_batch_size=512)]
    assert ("devices", "16", "8") in pairs_of(*cells)


def test_an_option_whose_name_begins_with_the_axis_is_held_fixed() -> None:
    grid = [(width, factor) for width in (1, 2) for factor in (1, 8)]
    cells = [cell(options={"workload.width": width, "workload.width_factor": factor}) for width, factor in grid]
    assert pairs_of(*cells) == [("workload.width", "2", "1")] * 2 + [("workload.width_factor", "8", "1")] * 2


def test_varying_axes_are_those_with_several_values() -> None:
    cells = [cell(), cell(devices=4, global_batch_size=128), cell(options={"optimizer.lr": 0.2})]
    assert varying_axes(cells) == ["devices", "optimizer.lr"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unset"), (True, "true"), (25, "25"), ("sum", "sum"), ([0, 1], "[0, 1]")]
)
def test_values_are_written_as_in_the_file(value: object, text: str) -> None:
    assert value_text(value) == text


def test_numbers_inside_names_are_ordered_as_numbers() -> None:
    assert sorted(["resnet18", "resnet8", "gpt"], key=natural) == ["gpt", "resnet8", "resnet18"]
