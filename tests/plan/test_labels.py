"""Labels: what differs between cells, all of it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from harness.config import yaml_source
from harness.config.axes import CELL_AXES, SHARED_SECTIONS, TrialAxes
from harness.config.load import parse_experiment
from harness.errors import ExperimentError
from harness.plan.cell import Cell
from harness.plan.comparison import axes_of
from harness.plan.labels import LONGEST, SEPARATOR, Labels, batch_text, devices_text, strategy_text
from harness.plan.planner import make_plan
from tests.any_experiment import experiments
from tests.conftest import gpu_cluster, laptop, plan_of

PLACED = {"strategy", "devices", "device_ids", "nodes", "oversubscribed", "emulated"}
CELL = Cell("image_classification", "digits", "resnet8", "ddp", "cpu", 2, 1, "weak", 8, 16)
CELL = replace(CELL, strategy_options={"bucket_cap_mb": 25}, optimizer={"name": "SGD", "lr": 0.1})


def labels_of(*cells: Cell) -> list[str]:
    labels = Labels(map(axes_of, cells))
    return [labels.of_cell(cell) for cell in cells]


SINGLE = replace(CELL, strategy="single", devices=1, strategy_options={})
OTHER = replace(CELL, model="resnet14", per_device_batch_size=16, precision="bf16", launcher="torchrun", compile=True)
COMPILED, GRAPHS = (replace(CELL, compile=True, compile_mode=mode) for mode in ("default", "reduce-overhead"))
RECOMPUTED = replace(CELL, activation_checkpointing="full")
ALL_OF_CELL = "ddp x2 · resnet8 · batch 8/device · fp32 · eager · ray"
ALL_OF_OTHER = "ddp x2 · resnet14 · batch 16/device · bf16 · compiled · torchrun"
SMALL, SCHEDULED = replace(CELL, strategy_options={"bucket_cap_mb": 1}), replace(CELL, schedule={"lr": 1})
FAST, ADAM = {"name": "SGD", "lr": 0.2}, {"name": "Adam", "lr": 0.1}


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        # strategy and devices are always named, and nothing else that all share
        ([CELL, replace(CELL, devices=4, global_batch_size=32)], ["ddp x2", "ddp x4"]),
        ([CELL, OTHER], [ALL_OF_CELL, ALL_OF_OTHER]),
        ([CELL, CELL.at_global_batch_size(16)], ["ddp x2 · batch 8/device", "ddp x2 · global batch 16"]),
        ([CELL, replace(CELL, data=None)], ["ddp x2 · digits", "ddp x2 · no data"]),
        # options of a strategy differ among its own cells alone
        ([SINGLE, CELL], ["single x1", "ddp x2"]),
        ([SINGLE, CELL, SMALL], ["single x1", "ddp x2 · bucket_cap_mb=25", "ddp x2 · bucket_cap_mb=1"]),
        # the full name of an option, if its last part is that of another or of an axis
        ([SCHEDULED, replace(SCHEDULED, optimizer=FAST)], ["ddp x2 · optimizer.lr=0.1", "ddp x2 · optimizer.lr=0.2"]),
        ([CELL, replace(CELL, optimizer=ADAM)], ["ddp x2 · optimizer.name=SGD", "ddp x2 · optimizer.name=Adam"]),
        ([CELL, replace(CELL, loader={"workers": 2})], ["ddp x2", "ddp x2 · workers=2"]),
        ([CELL, replace(CELL, env={"NCCL_ALGO": "Ring"})], ["ddp x2", "ddp x2 · NCCL_ALGO=Ring"]),
        ([COMPILED, GRAPHS], ["ddp x2 · compile_mode default", "ddp x2 · compile_mode reduce-overhead"]),
        ([CELL, RECOMPUTED], ["ddp x2 · no activation checkpointing", "ddp x2 · activation checkpointing"]),
    ],
)
def test_a_label_names_strategy_devices_and_what_differs(cells: list[Cell], labels: list[str]) -> None:
    assert labels_of(*cells) == labels


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        ("25", 25, ['"25"', "25"]),
        ("none", None, ["none", "null"]),
        ("a · b", "a", ['"a · b"', "a"]),
        (True, "true", ["true", '"true"']),
        ([1, 2], [2], ["[1, 2]", "[2]"]),
    ],
)
def test_values_that_differ_read_differently(one: Any, other: Any, texts: list[str]) -> None:
    labels = labels_of(*(replace(CELL, workload_options={"x": value}) for value in (one, other)))
    assert labels == [f"ddp x2 · x={text}" for text in texts]


def test_long_values_are_cut_and_still_differ() -> None:
    one, other = labels_of(*(replace(CELL, model="m" * 1000 + end) for end in "ab"))
    assert one != other and max(len(one), len(other)) <= LONGEST + len("ddp x2 · ")


def test_devices_and_what_sets_a_strategy_apart() -> None:
    axes = axes_of(replace(CELL, strategy="dp", device_ids=(0, 1), oversubscribed=True))
    assert strategy_text(axes) == "dp (emulated, oversubscribed)"
    assert devices_text(axes) == "2 (GPU 0,1)"
    assert devices_text({**axes, "link": "NV12"}) == "2 (GPU 0,1: NV12)"
    assert devices_text(axes_of(replace(CELL, devices=4, nodes=2))) == "4 on 2 nodes"
    assert batch_text(axes) == "batch 8/device"


def test_constants_are_what_all_cells_share_but_defaults() -> None:
    assert Labels([axes_of(CELL)]).constants == "image_classification · digits · resnet8 · batch 8/device · fp32"
    torchrun = [axes_of(replace(CELL, data=None, launcher="torchrun", compile=True, model=m)) for m in ("a", "b")]
    assert Labels(torchrun).constants == "image_classification · batch 8/device · fp32 · compiled · torchrun"
    assert Labels([]).constants == ""


def test_a_diagnostic_cell_names_what_differs_from_all_others() -> None:
    labels = Labels(map(axes_of, (CELL, replace(CELL, precision="bf16"))))
    check = CELL.at_global_batch_size(8)
    assert labels.of_cell(check) == "ddp x2 · global batch 8 · fp32"
    assert labels.of_cell(replace(check, compile=True)) == "ddp x2 · global batch 8 · fp32 · compiled"


def test_trials_of_a_cell_are_numbered() -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = plan_of(grid, diagnostics=True, convergence={"epochs": 1, "seeds": [7]})
    labels = {plan.labels.of_trial(trial) for trial in plan.trials}
    assert {"single x1 · block 0", "single x1 · block 0 · twin", "ddp x2 · block 1", "ddp x2 · seed 7"} <= labels
    assert "ddp x2 · global batch 8 · block 0 · equivalence" in labels


FEW = settings(max_examples=10, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate])


def parts_of(cell: Cell, cells: Sequence[Cell]) -> int:
    """The number of axes and options of a cell that vary among the cells, counted one by one, without the placement."""

    def has(other: Cell, name: str) -> bool:
        return name.partition(".")[0] in (other.strategy, *SHARED_SECTIONS)

    def option(other: Cell, name: str) -> str:
        return repr(other.options.get(name, "absent"))

    def batch(axes: TrialAxes) -> tuple[str, int | None]:
        strong = axes["scaling"] == "strong"
        return axes["scaling"], axes["global_batch_size"] if strong else axes["per_device_batch_size"]

    axes = [axes_of(other) for other in cells]
    without = PLACED | {"scaling", "per_device_batch_size", "global_batch_size", "options"}
    varying = [name for name in CELL_AXES if name not in without and len({str(dict(a)[name]) for a in axes}) > 1]
    names = {name for other in cells for name in other.options if has(cell, name)}
    options = [name for name in names if len({option(other, name) for other in cells if has(other, name)}) > 1]
    named = [name for name in options if name in cell.options]
    return len(varying) + (len(set(map(batch, axes))) > 1) + len(named)


@pytest.mark.slow
@settings(FEW, suppress_health_check=list(HealthCheck))
@given(experiments())
def test_labels_of_any_file_name_exactly_what_differs(content: dict[str, Any]) -> None:
    experiment = parse_experiment(yaml_source.parse_mapping(yaml.safe_dump(content), source="f"), source="f")
    for inventory in (laptop(2), gpu_cluster(3, 4)):
        try:
            plan = make_plan(experiment, inventory)
        except ExperimentError:  # too large
            return
        trials = [*plan.trials, *plan.skips]
        cells = list(dict.fromkeys(trial.cell for trial in trials if trial.kind != "diagnostic"))
        labels = [plan.labels.of_cell(cell) for cell in cells]
        assert len(set(labels)) == len(labels)
        trials = [plan.labels.of_trial(trial) for trial in plan.trials]
        assert len(set(trials)) == len(trials)
        for cell, label in list(zip(cells, labels, strict=True))[:10]:
            assert len(label.split(SEPARATOR)) == 1 + parts_of(cell, cells), label
