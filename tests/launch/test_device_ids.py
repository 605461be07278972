"""Cells that name their GPUs: from the file to the processes that use just these."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pandas as pd
import pytest
import torch

from harness.analysis.ratios import scaling
from harness.analysis.trials import trials as trials_of
from harness.cli.arguments import parse_only
from harness.config.load import parse_experiment
from harness.errors import ExperimentError
from harness.launch.protocol import process_variables
from harness.launch.ray.launcher import RayLauncher
from harness.launch.worker import devices_of, gpus_by_number
from harness.plan.cell import Cell, Placement, place
from harness.plan.comparison import base_cell
from harness.plan.feasibility import reason_to_skip
from harness.plan.inventory import Inventory, Machine, Node
from harness.plan.labels import devices_text
from harness.plan.planner import Plan, filter_plan, make_plan
from harness.plan.rows import SkipCode
from harness.plan.trial import WorkerGroup
from tests.conftest import Make, gpu_cluster, laptop
from tests.records import line, steps_of

PAIRS = {"strategy": ["single", "dp", "ddp"], "device_ids": [[0, 1], [1, 2]], "per_device_batch_size": 8}
CELL = Cell("image_classification", "digits", "resnet18", "ddp", "cuda", 2, 1, "weak", 8, 16, device_ids=(1, 2))
THREE = {"devices": 3, "device_ids": (0, 1, 2)}
UNEVEN = "a worker group with device_ids takes every GPU of its node, and 8 GPUs do not split evenly over 3 workers"
EIGHT = Machine("cuda", 8, (8,), compiler=True)


def group(placement: Placement, launcher: str = "ray") -> WorkerGroup:
    return WorkerGroup("b0-g0", 0, placement, "cuda", False, (), launcher)


# --- the file


def test_device_ids_determine_the_device_count(make_experiment: Make) -> None:
    grid = make_experiment({**PAIRS, "device_ids": [[0, 1], [0, 1, 2, 3], [2]]}).grid
    assert grid and grid.device_ids == ((0, 1), (0, 1, 2, 3), (2,))
    assert grid.devices == (2, 4, 1)
    plain = make_experiment({**PAIRS, "device_ids": [3, 1]}).grid
    assert plain and plain.device_ids == ((3, 1),), "a plain list is one choice"
    experiment = make_experiment(PAIRS)
    assert parse_experiment(experiment.model_dump(mode="json"), source="resolved") == experiment
    assert make_experiment({**PAIRS, "devices": 2}) == experiment, "a matching count is allowed beside them"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"devices": [4]}, "grid: got devices [4] and device_ids [[0, 1], [1, 2]], which are [2] devices; leave devic"),
        ({"nodes": 2}, "grid: got nodes [2] and device_ids, which belong to one node; leave nodes out"),
        ({"device_ids": [[0, 0]]}, "grid.device_ids[0]: got [0, 0]; allowed: the numbers of one or more"),
        ({"device_ids": [[]]}, "grid.device_ids[0]: got []; allowed: the numbers of one or more"),
        ({"device_ids": [[-1]]}, "grid.device_ids[0][0]: got -1; it should be greater than or equal to 0"),
        ({"device_ids": [["a"]]}, "grid.device_ids[0][0]: got 'a'; allowed: an integer"),
        ({"device_ids": "0,1"}, "grid.device_ids[0][0]: got '0,1'; allowed: an integer"),
    ],
)
def test_conflicting_device_options_are_refused(change: dict[str, Any], problem: str, make_experiment: Make) -> None:
    with pytest.raises(ExperimentError) as refused:
        make_experiment({**PAIRS, **change})
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)


# --- the plan


def ids_by_strategy(plan: Plan) -> set[tuple[str, tuple[int, ...]]]:
    return {(trial.cell.strategy, trial.cell.device_ids) for trial in plan.trials}


def test_each_pair_goes_to_each_strategy_with_its_base_and_its_checks(make_experiment: Make) -> None:
    on_cpu_slots = make_plan(make_experiment(PAIRS), laptop())
    assert not on_cpu_slots.trials
    reasons = {skip.text for skip in on_cpu_slots.skips.values()}
    assert reasons == {"device_ids applies to GPUs; CPU slots have no numbers"}
    plan = make_plan(make_experiment(PAIRS), gpu_cluster(gpus=4))
    assert ids_by_strategy(plan) == {
        ("single", (0,)),
        ("single", (1,)),
        *((strategy, ids) for strategy in ("dp", "ddp") for ids in ((0, 1), (1, 2))),
    }
    assert {each.text for each in plan.impossible.values()} == {"single runs on at most one device"} and not plan.skips
    assert {len({t.cell.device_ids for t in group.trials}) for group in plan.groups} == {1}
    for trial in plan.trials:
        assert base_cell(trial.cell).device_ids == trial.cell.device_ids[:1]
    assert {str(group.placement) for group in plan.groups} == {
        "1 worker with 1 device on GPU 0",
        "1 worker with 1 device on GPU 1",
        *(
            f"{workers} on GPU {ids}"
            for workers in ("1 worker with 2 devices", "2 workers with 1 device each")
            for ids in ("0,1", "1,2")
        ),
    }
    plan = make_plan(make_experiment(PAIRS, diagnostics=True), gpu_cluster(gpus=4))
    checks = {(t.cell.strategy, t.cell.device_ids) for t in plan.trials if t.purpose == "equivalence"}
    assert checks == ids_by_strategy(plan) | {("single", (0,)), ("single", (1,))}
    explained = {(t.cell.strategy, t.cell.device_ids) for t in plan.trials if t.purpose == "explain"}
    assert explained == {("ddp", (0,)), ("ddp", (1,))}


@pytest.mark.parametrize(
    ("change", "gpus", "reason"),
    [
        ({}, (8,), None),
        ({}, (2, 8), None),
        ({}, (2, 1), "too few devices: needs GPU 2 of one node, counted from 0, has 2 + 1 GPUs"),
        ({"oversubscribed": True}, (2,), "too few devices: needs GPU 2 of one node, counted from 0, has 2 GPUs"),
        (THREE, (8,), UNEVEN),
        ({**THREE, "strategy": "dp"}, (8,), None),
        ({**THREE, "launcher": "torchrun"}, (8,), None),
    ],
)
def test_reasons_of_infeasible_cells(change: dict[str, Any], gpus: tuple[int, ...], reason: str | None) -> None:
    found = reason_to_skip(replace(CELL, **change), replace(EIGHT, devices_per_node=gpus))
    assert (found and found.text) == reason
    assert found is None or found.code in get_args(SkipCode)


def test_filters_and_exclusions_name_a_pair(make_experiment: Make) -> None:
    assert CELL.matches({"device_ids": [1, 2]}) and CELL.matches({"device_ids": [[0, 1], [1, 2]]})
    assert not CELL.matches({"device_ids": [[0, 1]]}) and not replace(CELL, device_ids=()).matches(
        {"device_ids": [1, 2]}
    )
    assert parse_only("strategy=ddp,device_ids=[1, 2],devices=2") == {
        "strategy": ["ddp"],
        "device_ids": [[1, 2]],
        "devices": [2],
    }
    plan = make_plan(make_experiment(PAIRS, exclude=[{"device_ids": [0, 1]}]), gpu_cluster(gpus=4))
    assert {ids for _, ids in ids_by_strategy(plan)} == {(1, 2), (1,)}
    part = filter_plan(make_plan(make_experiment(PAIRS), gpu_cluster(gpus=4)), {"device_ids": [[0, 1]]})
    assert {ids for _, ids in ids_by_strategy(part)} == {(0, 1), (0,)}


# --- the processes


def test_a_worker_group_takes_the_whole_node_and_each_worker_its_own_of_the_named(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = tuple(Node(f"n{i}", f"10.0.0.{i}", f"h{i}", 64, gpus) for i, gpus in enumerate((2, 8, 8)))
    machine = replace(EIGHT, devices_per_node=(2, 8, 8))
    inventory: Any = SimpleNamespace(inventory=Inventory(nodes), request=None, embedded=False)
    gone: set[str] = set()

    def answers(_cluster: Any, _question: str, things: Any) -> list[bool | None]:
        return [None if name in gone else True for name, _ in things]

    monkeypatch.setattr("harness.launch.ray.nodes.ask_agents", answers)
    monkeypatch.setattr("harness.launch.ray.private.draining_nodes", set)
    with closing(RayLauncher(inventory, make_experiment(PAIRS), machine)) as launcher:

        def scaling(cell: Cell) -> Any:
            asked = group(place(cell))
            return launcher._scaling(asked, launcher.choice.nodes_for(asked))

        ddp, dp = scaling(CELL), scaling(replace(CELL, strategy="dp"))
        anywhere = scaling(replace(CELL, device_ids=()))
        gone.add("n1")
        moved = scaling(CELL)
    assert (ddp.num_workers, ddp.resources_per_worker["GPU"]) == (2, 4.0)
    assert ddp.label_selector == [{"ray.io/node-id": "n1"}] * 2
    assert moved.label_selector == [{"ray.io/node-id": "n2"}] * 2
    assert (dp.num_workers, dp.resources_per_worker["GPU"]) == (1, 8.0)
    assert (anywhere.resources_per_worker["GPU"], anywhere.label_selector) == (1.0, [{"ray.io/node-id": "n0"}] * 2)


def see_gpus(buses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see GPUs on these buses, in this order."""

    def properties(place: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[place], pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(buses))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.parametrize(
    ("buses", "ids", "places"),
    [
        ([0, 1, 2, 3], [1, 2], [1, 2]),
        ([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 10], [1, 4, 2]),  # as Ray sorts their numbers
        ([4, 5, 6, 7], [0, 3], [0, 3]),
        ([9, 3], [1], [0]),  # in the order of the user's CUDA_VISIBLE_DEVICES
    ],
)
def test_torch_finds_the_named_gpus_among_those_that_it_sees(
    buses: list[int], ids: list[int], places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(buses, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus_by_number(ids) == [torch.device("cuda", place) for place in places]
    with pytest.raises(RuntimeError, match=rf"GPU 99 is asked for, but this process sees {len(buses)} .*DEVICES='0,1'"):
        gpus_by_number([0, 99])


def test_each_worker_takes_its_own_of_the_named_by_the_numbers_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus([0, 1, 2, 3], monkeypatch)
    gpus = [torch.device("cuda", number) for number in range(4)]
    ddp, dp = (group(place(replace(CELL, strategy=name))) for name in ("ddp", "dp"))
    assert [devices_of(ddp, rank, gpus) for rank in (0, 1)] == [(torch.device("cuda:1"),), (torch.device("cuda:2"),)]
    assert devices_of(dp, 0, gpus) == (torch.device("cuda:1"), torch.device("cuda:2"))
    assert process_variables(group(place(CELL)), 4)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    unnamed = group(Placement(1, 2, 1))
    assert "CUDA_DEVICE_ORDER" not in process_variables(unnamed, 4)
    assert process_variables(unnamed, 4)["TEARDOWN_CUPTI"] == "1", "a profile would leave it in the process"
    assert "TEARDOWN_CUPTI" not in process_variables(replace(unnamed, device="cpu"), 4)


# --- the tables


def test_pairs_are_rows_of_their_own_with_their_link() -> None:
    lines = [line(block=block, device_ids="0", device="cuda") for block in (0, 1)]
    for name, rate, link in (("0,1", 90.0, "NV12"), ("0,2", 60.0, "SYS")):
        pair: dict[str, Any] = {"strategy": "ddp", "device": "cuda", "device_ids": name, "rates": (rate, rate)}
        lines += [line(f"ddp{name}", block=block, facts={"steady": True, "link": link}, **pair) for block in (0, 1)]
    table = scaling(trials_of(lines, steps_of(lines)))
    found = table[["device_ids", "link", "speedup"]].to_dict("records")
    assert [(row["device_ids"], row["link"], round(row["speedup"], 6)) for row in found if pd.notna(row["link"])] == [
        ("0,1", "NV12", 1.8),
        ("0,2", "SYS", 1.2),
    ]
    texts = [devices_text(row) for row in table.to_dict("records")]
    assert texts == ["1 (GPU 0)", "2 (GPU 0,1: NV12)", "2 (GPU 0,2: SYS)"]
