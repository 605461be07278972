"""A cell's identity is its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.experiment import load_experiment, parse_experiment
from harness.plan.cell import EARLIER, Cell, why_none
from harness.plan.comparison import axes_of
from harness.plan.grid import expand
from harness.plan.inventory import Inventory, resolve
from harness.plan.planner import make_plan
from tests.conftest import laptop

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
    "uneven": True,
    "variant": "after",
    "code": "0123456789ab",
}


@pytest.mark.parametrize("name", [field.name for field in fields(Cell) if field.compare])
def test_every_field_changes_the_id(name: str) -> None:
    assert replace(CELL, **{name: OTHER[name]}).id != CELL.id


def hash_of(cell: Cell) -> str:
    """The id of a cell in versions without variants, unequal shares and changes of meaning."""
    content = {each.name: getattr(cell, each.name) for each in fields(Cell) if each.compare}
    del content["variant"], content["code"], content["uneven"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_a_cell_without_variants_has_the_id_of_versions_that_had_none() -> None:
    assert CELL.id == hash_of(CELL)


def test_an_examination_is_of_one_variant() -> None:
    assert replace(CELL, variant="after", code="0123456789ab").workload_key != CELL.workload_key


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
        ({"devices": [[2, 4]]}, True),
        ({"devices": [[1, 2], 3]}, False),
        ({"compile": [[True, False]]}, True),
        ({"compile": 0}, False),
    ],
)
def test_filters(wanted: dict[str, Any], matches: bool) -> None:
    assert CELL.matches(wanted) is matches


def test_what_no_cell_matches_is_explained_by_the_values_of_the_cells() -> None:
    cells = [CELL, replace(CELL, strategy="single", devices=1)]
    assert why_none(cells, {"devices": [True]}) == "devices: got [true]; its cells have 1, 4"
    assert why_none(cells, {"strategy": "dp", "devices": 1}) == 'strategy: got "dp"; its cells have "ddp", "single"'
    both = {"strategy": "single", "devices": 4}
    assert why_none(cells, both) == 'it has each of {"strategy": "single", "devices": 4}, but not in one cell'
    many = [replace(CELL, devices=n) for n in range(1, 40)]
    assert why_none(many, {"devices": 99}).endswith("17, 18, 19, 20")


def test_dataparallel_on_a_cpu_is_emulated() -> None:
    assert replace(CELL, strategy="dp").emulated
    assert not replace(CELL, strategy="dp", device="cuda").emulated
    assert not CELL.emulated and not CELL.emulated_compute


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_that_wait_are_emulated_under_every_strategy(device: str) -> None:
    cell = replace(CELL, workload="emulated_compute", device=device)
    assert cell.emulated and cell.emulated_compute
    assert axes_of(cell)["emulated_compute"] and not axes_of(CELL)["emulated_compute"]


@pytest.mark.parametrize(
    ("scaling", "factor"), [({}, 1.0), ({"lr_scaling": "linear"}, 2.0), ({"lr_scaling": "sqrt"}, 2.0**0.5)]
)
def test_the_rate_follows_the_global_batch(scaling: dict[str, Any], factor: float) -> None:
    cell = replace(CELL, training={"lr_base_batch_size": 16, **scaling})
    assert cell.lr_factor == factor
    assert cell.at_global_batch_size(16).lr_factor == 1.0


ROOT = Path(__file__).parents[2]
RECORDED = json.loads((Path(__file__).parent / "ids_before_meanings.json").read_text())
"""The ids of every planned cell of two experiment files and a run, before an option or a meaning was added."""


def planned(file: Path, inventory: Inventory) -> dict[str, Cell]:
    plan = make_plan(load_experiment(file), inventory)
    return {trial.cell.id: trial.cell for trial in [*plan.trials, *(skip.trial for skip in plan.skips)]}


@pytest.mark.parametrize(
    ("file", "recorded", "inventory"),
    [
        ("experiments/scaling.yaml", "experiments/scaling.yaml", Inventory.assume(1, 0, 2)),
        ("experiments/resnet50_8xgpu.yaml", "experiments/resnet50_8xgpu.yaml", Inventory.assume(1, 8)),
        ("tests/run_folder_v2/experiment.yaml", "results/example of 2026-11-22", Inventory.assume(1, 0, 2)),
    ],
)
def test_a_cell_has_its_recorded_id_unless_it_means_something_else_now(
    file: str, recorded: str, inventory: Inventory
) -> None:
    now = planned(ROOT / file, inventory)
    same = {cell_id for cell_id, cell in now.items() if not cell.meanings}
    assert same == now.keys() & set(RECORDED[recorded])
    assert same or inventory.nodes[0].gpus  # of the GPU file's cells each is fsdp's, bf16's, or a check of one
    assert all(cell.strategy == "fsdp" or cell.precision == "bf16" for cell in now.values() if cell.meanings)


def test_the_ids_of_the_first_version_are_not_taken_again() -> None:
    """Its cells had no training options: a run of it is never resumed."""
    folder = ROOT / "tests" / "run_folder_v1"
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert {line["cell_id"] for line in lines} >= {"9b6fd7dada27", "3230e490a1d7"}
    assert not planned(folder / "experiment.yaml", Inventory.assume(1, 0, 2)).keys() & {x["cell_id"] for x in lines}


@pytest.mark.parametrize(("name", "value"), EARLIER.items())
def test_an_option_at_the_value_of_earlier_versions_leaves_the_id_as_it_was(name: str, value: object) -> None:
    def cells(options: dict[str, object]) -> list[Cell]:
        strategy = name.partition(".")[0] if name.startswith(("ddp.", "fsdp.")) else "ddp"
        grid = {"strategy": strategy, "devices": 2, "per_device_batch_size": 8, **options}
        content = {"name": "x", "grid": grid, "schedule": {"name": "StepLR", "step_size": 1}}
        return list(
            expand(parse_experiment(content, source="x"), resolve(laptop(), request="cpu", device_counts=(2,))).asked
        )

    other = {False: True, None: True, "epoch": "step", "none": "bf16_compress", "auto": "gloo", "flat": "hybrid"}[value]
    (without,), (earlier, changed) = cells({}), cells({name: [value, other]})
    assert earlier.id == without.id != changed.id
    assert changed.matches({name: other}) and not changed.matches({name: value})
    assert without.matches({name: value}) and not without.matches({name: other})
    assert name not in without.options and changed.options[name] == other


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        (replace(CELL, strategy="fsdp"), ["fsdp-2"]),
        (replace(CELL, precision="bf16"), ["bf16-2"]),
        (replace(CELL, strategy="dp", loader={"workers": 2}), ["dp-workers-2"]),
        (replace(CELL, strategy="dp", loader={"workers": 0}), []),
        (replace(CELL, loader={"workers": 2}), []),
        (replace(CELL, precision="fp16"), []),
        (replace(CELL, data="synthetic"), ["synthetic-images-2"]),
        (replace(CELL, data="synthetic_device"), []),  # no loader: its speed is the same
        (replace(CELL, workload="mlp", data="synthetic"), []),
    ],
)
def test_a_change_of_meaning_changes_the_id(cell: Cell, names: list[str]) -> None:
    assert [meaning.name for meaning in cell.meanings] == names
    assert (cell.id == hash_of(cell)) == (not names)
