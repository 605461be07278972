"""The bundles that are requested from an autoscaler, and the plan on what it brought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.plan.inventory import Inventory, Machine, Node
from harness.plan.planner import Plan
from harness.run.growth import Demand, cpus_of_a_slot, joint_bundles, lacking, needed_bundles
from tests.conftest import plan_of

EMPTY = Inventory((), attached=True)


def nodes(*gpus: int, cores: int = 32) -> Inventory:
    return Inventory(tuple(Node(f"n{i}", "", f"n{i}", cores, n) for i, n in enumerate(gpus)), attached=True)


def plan_on(inventory: Inventory, device: str = "cuda", **grid: Any) -> Plan:
    return plan_of({"per_device_batch_size": 8, **grid}, inventory, device=device)


@pytest.mark.parametrize(
    ("demands", "bundles"),
    [
        ([], []),
        ([Demand(1, 8)], [8]),
        ([Demand(8, 1)], [1] * 8),
        ([Demand(1, 8), Demand(10, 1)], [8, 1, 1]),
        ([Demand(1, 8), Demand(8, 1)], [8]),
        ([Demand(1, 2), Demand(1, 4), Demand(1, 8)], [8]),
        ([Demand(2, 4, apart=True), Demand(1, 8)], [8, 4]),
        ([Demand(2, 4, apart=True), Demand(8, 1)], [4, 4]),
        ([Demand(3, 2, apart=True), Demand(2, 4, apart=True)], [4, 4, 2]),
        ([Demand(1, 3), Demand(4, 2)], [3, 2, 2, 2]),
    ],
)
def test_joint_bundles(demands: list[Demand], bundles: list[int]) -> None:
    assert joint_bundles(demands) == joint_bundles(demands[::-1]) == bundles


@pytest.mark.parametrize(
    ("grid", "there", "bundles"),
    [
        ({"devices": 1}, EMPTY, [1]),
        ({"strategy": "ddp", "devices": [1, 8]}, EMPTY, [1] * 8),
        ({"strategy": "dp", "devices": 8}, EMPTY, [8]),
        ({"strategy": ["dp", "ddp"], "devices": [8, 16]}, EMPTY, [16]),
        ({"strategy": "ddp", "devices": 8, "nodes": 1}, EMPTY, [8]),
        ({"strategy": "ddp", "devices": 8, "nodes": 2}, EMPTY, [4, 4]),
        ({"strategy": "ddp", "devices": 2, "nodes": 2}, nodes(8), [8, 8]),  # of 1 each, both would fit on one node
        ({"strategy": "ddp", "devices": 8, "nodes": 2}, nodes(2, 4, 8), [4, 4]),
        ({"strategy": "ddp", "devices": 8}, nodes(4), [1] * 8),
        ({"strategy": "ddp", "devices": 8}, nodes(4, 4), [4, 4]),  # there, and held
        ({"strategy": "ddp", "device_ids": [[0, 1], [2, 3]]}, EMPTY, [4]),
        ({"strategy": "ddp", "devices": [2, 3], "nodes": 2}, EMPTY, [1, 1]),  # 3 devices on 2 nodes are impossible
    ],
)
def test_what_the_largest_cells_need(grid: dict[str, Any], there: Inventory, bundles: list[int]) -> None:
    assert needed_bundles(plan_on(there, **grid)) == [{"GPU": float(size)} for size in bundles]


def test_cpu_slots_are_requested_in_the_cpus_that_ray_counts() -> None:
    """A node of 4 cores and 8 hardware threads has 2 slots of 2 threads each, for which Ray counts 4 CPUs."""
    node = Node("n0", "", "n0", 4, slots=8)
    plan = plan_on(Inventory((node,), attached=True), "cpu", strategy="ddp", devices=[2, 6])
    assert (plan.machine.threads_per_device, plan.machine.devices_per_node) == (2, (2,))
    assert needed_bundles(plan) == [{"CPU": 4.0}] * 6


@pytest.mark.parametrize(
    ("offers", "per_node", "cpus"),
    [((), (), 2), ((8,), (4,), 2), ((8, 16), (4, 2), 2), ((3,), (2,), 1), ((0, 4), (0, 1), 4)],
)
def test_cpus_of_a_slot(offers: tuple[int, ...], per_node: tuple[int, ...], cpus: int) -> None:
    inventory = Inventory(tuple(Node(f"n{i}", "", "", 4, slots=n) for i, n in enumerate(offers)))
    assert cpus_of_a_slot(inventory, Machine("cpu", 2, per_node, compiler=True)) == cpus


def test_cells_that_share_devices_need_no_more_nodes() -> None:
    grid = {"strategy": "ddp", "devices": [1, 8], "per_device_batch_size": 8}
    plan = plan_of(grid, nodes(2), device="cuda", oversubscribe=True)
    assert not lacking(plan) and needed_bundles(plan) == [{"GPU": 1.0}]


def test_what_the_autoscaler_cannot_bring_is_left_out_of_the_request() -> None:
    plan = plan_on(nodes(4), strategy=["dp", "ddp"], devices=[4, 8, 12])
    assert len(lacking(plan)) == 4
    assert needed_bundles(plan) == [{"GPU": 12.0}]
    given_up = {Demand(1, 12)}
    assert needed_bundles(plan, given_up) == [{"GPU": 8.0}] + [{"GPU": 1.0}] * 4
    given_up |= {Demand(12, 1), Demand(1, 8), Demand(8, 1)}
    assert needed_bundles(plan, given_up) == [{"GPU": 4.0}]  # what runs already is never given up
    assert needed_bundles(plan, {Demand(1, 4), Demand(1, 1), *given_up}) == [{"GPU": 4.0}]


def test_demands_are_ordered_by_their_devices_and_then_by_those_together() -> None:
    demands = [Demand(1, 8), Demand(8, 1), Demand(2, 4, apart=True), Demand(2, 8, apart=True), Demand(1, 12)]
    assert sorted(demands, key=lambda each: each.size) == [demands[i] for i in (1, 2, 0, 4, 3)]


def test_what_did_not_come_is_skipped_with_that_reason_if_it_is_all() -> None:
    plan = plan_on(replace(nodes(4), waited_s=600.0), strategy="ddp", devices=[2, 8])
    reason = "too few devices: needs 8 on one node, has 4 GPUs; no more came in 600 s (cluster.wait_for)"
    assert {skip.text for skip in plan.skips.values()} == {reason}
    for device in ("cpu", "cuda", "auto"):
        plan = plan_of(inventory=EMPTY, device=device)
        assert not plan.trials and {skip.code for skip in plan.skips.values()} == {"too_few_devices"}


def test_the_wait_changes_no_cell() -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plain, waiting = (plan_of(grid, nodes(2), **more) for more in ({}, {"cluster": {"wait_for": "10m"}}))
    assert [trial.id for trial in plain.trials] == [trial.id for trial in waiting.trials]
    assert plain.experiment.cluster is None
    assert waiting.experiment.cluster is not None and waiting.experiment.cluster.wait_for == 600
