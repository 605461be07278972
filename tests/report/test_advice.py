"""What the verdict proposes to try: every part of a step has an answer, and every proposal is a file that runs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from harness.analysis.waterfall import PARTS
from harness.config.experiment import Experiment, parse_experiment
from harness.plan.cell import Cell
from harness.plan.grid import expand
from harness.plan.inventory import Inventory, resolve
from harness.report.causes import ADVICE, BUCKETS, MACHINE, Option, next_experiment, options_to_try, varied_options
from harness.report.labels import Row

AXES: dict[str, Any] = {"data": "digits", "model": "resnet8", "strategy": "ddp", "devices": 2, "device_ids": None}
BATCHES: dict[str, Any] = {"scaling": "weak", "per_device_batch_size": 32, "global_batch_size": 64}
CELL = Row(**AXES, **BATCHES, nodes=1, precision="fp32", compile=False)
GRID = {"data": ["digits"], "model": ["resnet8"], "strategy": ["ddp"], "devices": [2], "per_device_batch_size": [32]}


def experiment(**content: Any) -> Experiment:
    return parse_experiment({"name": "study", "grid": GRID, "device": "cpu", **content}, source="test")


def cells_of(study: Experiment) -> tuple[Cell, ...]:
    return expand(study, resolve(Inventory.assume(1, 0), request="cpu", device_counts=(2,))).asked


def test_every_part_of_a_step_has_an_answer() -> None:
    assert set(PARTS) - {"rest"} == set(ADVICE) | set(MACHINE)


@pytest.mark.parametrize("part", ADVICE)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_proposal_is_an_experiment_file_that_compares_its_values(part: str, strategy: str) -> None:
    cell = Row(CELL, strategy=strategy)
    for option in options_to_try(part, cell, experiment()):
        text = next_experiment(experiment(), cell, {}, option)
        found = parse_experiment(yaml.safe_load(text), source="next")
        cells = cells_of(found)
        assert len({str(cell.axis(option.axis)) for cell in cells}) == len(option.values)
        assert {cell.devices for cell in cells} == {2}


def test_options_of_another_strategy_and_of_a_batch_that_does_not_divide_are_not_proposed() -> None:
    found = options_to_try("exposed communication", Row(CELL, strategy="fsdp"), experiment())
    assert [str(option) for option in found] == ["training.accumulation: [1, 4]"]
    uneven = Row(CELL, strategy="fsdp", per_device_batch_size=6)
    assert options_to_try("reduce-scatter", uneven, experiment()) == []


def test_an_axis_that_the_file_varies_is_not_proposed_again() -> None:
    in_section = {"strategy_options": {"ddp": {"bucket_cap_mb": [1, 25]}}}
    contents: list[dict[str, Any]] = [{}, in_section, {"grid": {**GRID, "ddp.bucket_cap_mb": [1, 25]}}]
    found = [options_to_try("exposed communication", CELL, experiment(**content)) for content in contents]
    assert [BUCKETS in options for options in found] == [True, False, False]


@pytest.mark.parametrize(("parameters", "offered"), [(19_000, False), (262_144, False), (262_145, True), (None, True)])
def test_buckets_and_compression_are_not_for_a_gradient_that_the_first_bucket_holds(
    parameters: int | None, offered: bool
) -> None:
    found = options_to_try("exposed communication", Row(CELL, parameters=parameters), experiment())
    assert [option.axis for option in found if option.axis.startswith("ddp.")] == (
        ["ddp.bucket_cap_mb", "ddp.comm_hook"] if offered else []
    )


@pytest.mark.parametrize(("cores", "values"), [(1, None), (2, (0, 1)), (4, (0, 2)), (6, (0, 2, 3)), (64, (0, 2, 4))])
def test_a_node_has_cores_for_the_loader_workers_of_its_devices(cores: int, values: tuple[int, ...] | None) -> None:
    found = options_to_try("waiting for data", CELL, experiment(), cores)
    assert [option.values for option in found] == ([values] if values else [])


def test_an_option_reads_as_a_line_of_the_file() -> None:
    assert str(BUCKETS) == "ddp.bucket_cap_mb: [1, 25, 100]"
    assert str(Option("ddp.comm_hook", ("none", "bf16_compress"))) == "ddp.comm_hook: [none, bf16_compress]"


def test_the_next_file_holds_the_cells_other_options_and_settings_and_named_gpus() -> None:
    sgd = {"name": "SGD", "lr": [0.1, 0.2]}
    study = experiment(optimizer=sgd, throughput={"blocks": 4}, workload_options={"width": 8})
    text = next_experiment(study, CELL, {"optimizer.lr": 0.2}, BUCKETS)
    found = parse_experiment(yaml.safe_load(text), source="next")
    assert varied_options(study) == ["optimizer.lr"]
    assert found.throughput is not None and found.throughput.blocks == 4
    assert found.convergence is None and found.name == "study-next"
    cells = cells_of(found)
    assert {(cell.optimizer["lr"], cell.workload_options["width"]) for cell in cells} == {(0.2, 8)}
    cell = Row(CELL, device_ids="0,4")
    grid = yaml.safe_load(next_experiment(experiment(), cell, {}, BUCKETS))["grid"]
    assert grid["device_ids"] == [[0, 4]] and "devices" not in grid
