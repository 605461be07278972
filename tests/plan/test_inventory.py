"""Threads, slots and where devices fit."""

from __future__ import annotations

import pytest

from harness.plan.inventory import Inventory, Node, resolve


def nodes(*cores_and_gpus: tuple[int, int]) -> Inventory:
    return Inventory(tuple(Node(str(i), str(i), str(i), cores, gpus) for i, (cores, gpus) in enumerate(cores_and_gpus)))


@pytest.mark.parametrize(
    ("inventory", "request_", "counts", "device", "threads", "per_node"),
    [
        (nodes((2, 0)), "auto", [1, 2, 4, 8], "cpu", 1, (2,)),
        (nodes((16, 0)), "auto", [1, 2, 4, 8], "cpu", 2, (8,)),
        (nodes((16, 0)), "auto", [1], "cpu", 16, (1,)),
        (nodes((6, 0)), "auto", [1, 4], "cpu", 1, (6,)),
        (nodes((1, 0)), "auto", [2], "cpu", 1, (1,)),
        (nodes((64, 8)), "auto", [1, 8], "cuda", 8, (8,)),
        (nodes((16, 8)), "auto", [1, 8], "cuda", 2, (8,)),
        (nodes((4, 8)), "auto", [1, 8], "cuda", 1, (8,)),
        (nodes((64, 8)), "cpu", [1, 8], "cpu", 8, (8,)),
        (nodes((64, 8), (64, 4)), "auto", [1], "cuda", 8, (8, 4)),
        (nodes((8, 0), (4, 0)), "auto", [1, 4], "cpu", 1, (8, 4)),
        (nodes((8, 0)), "cuda", [1], "cuda", 1, (0,)),
    ],
)
def test_threads_and_slots(
    inventory: Inventory,
    request_: str,
    counts: list[int],
    device: str,
    threads: int,
    per_node: tuple[int, ...],
) -> None:
    machine = resolve(inventory, request=request_, device_counts=counts)
    assert (machine.device, machine.threads_per_device, machine.devices_per_node) == (device, threads, per_node)


def test_ray_is_never_asked_for_more_cores_than_there_are() -> None:
    machine = resolve(nodes((4, 8)), request="auto", device_counts=[8])
    assert machine.cpus_per_device * 8 <= 4


@pytest.mark.parametrize(
    ("devices", "fewest"), [(1, 1), (8, 1), (9, 3), (11, None), (10, 2), (16, 2), (20, None), (12, 2), (18, 3)]
)
def test_fewest_nodes(devices: int, fewest: int | None) -> None:
    machine = resolve(nodes((64, 8), (64, 8), (64, 6)), request="auto", device_counts=[1])
    assert machine.fewest_nodes(devices) == fewest


def test_an_inventory_as_text() -> None:
    assert str(nodes((2, 0))) == "1 node, 2 CPU cores, no GPU"
    assert str(Inventory.assume(2, 8)) == "assumed: 2 nodes, 128 CPU cores, 16 GPUs"


@pytest.mark.parametrize(
    ("slots", "emulated", "per_node"),
    [((4, 8), True, (4, 8)), ((4, 8), False, (2, 2)), ((None, None), True, (2, 2)), ((1, 2), True, (1, 2))],
)
def test_emulated_compute_has_the_slots_that_ray_offers(
    slots: tuple[int | None, int | None], emulated: bool, per_node: tuple[int, ...]
) -> None:
    inventory = Inventory(tuple(Node(str(i), str(i), str(i), 2, slots=offered) for i, offered in enumerate(slots)))
    machine = resolve(inventory, request="auto", device_counts=[1, 2, 8], emulated=emulated)
    assert machine.devices_per_node == per_node
    assert machine.threads_per_device == machine.cpus_per_device == 1
