"""The table of known GPUs, the names that are refused, and a machine's threads, slots and nodes."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.known_hardware import KNOWN_DEVICES, device_named, device_of_driver
from harness.config.load import parse_experiment
from harness.plan.inventory import Inventory, Node, resolve
from harness.plan.planner import make_plan


def test_the_name_of_a_device_ends_with_its_memory_or_its_board() -> None:
    for name, device in KNOWN_DEVICES.items():
        assert f"-{device.gb}GB" in name
    drivers = [driver for device in KNOWN_DEVICES.values() for driver in device.drivers]
    assert len(drivers) == len({*drivers})


def test_a_device_is_named_in_upper_or_lower_case_or_by_its_driver() -> None:
    assert device_named("a100-40gb") is KNOWN_DEVICES["A100-40GB"]
    assert device_named("A100-40GB").memory_bytes == 40_000_000_000
    found = device_of_driver("NVIDIA H100 80GB HBM3")
    assert found and found.name == "H100-80GB"
    assert device_of_driver("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert all(bool(device.peaks) == bool(device.peak_source) for device in KNOWN_DEVICES.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H100", "give one of H100-80GB, H100-80GB-PCIe, H100-94GB-NVL"),
        ("gh200", "give one of GH200-96GB, GH200-144GB"),
        ("L4", "give its name with the memory, L4-24GB"),
        ("H100-81GB", "unknown device 'H100-81GB'; did you mean 'H100-80GB'?"),
        ("x" * 500, f"unknown device '{'x' * 40}'; (allowed: "),
    ],
)
def test_an_ambiguous_or_unknown_name_is_refused_with_the_choices(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        device_named(name)
    assert message in str(caught.value)


def test_an_assumed_device_is_that_of_every_node() -> None:
    inventory = Inventory.assume(2, 8, device=device_named("H100-80GB"))
    assert {(node.gpu_model, node.gpu_memory_bytes) for node in inventory.nodes} == {("H100-80GB", 80 * 10**9)}
    assert str(inventory) == "assumed: 2 nodes, 128 CPU cores, 16 GPUs (H100-80GB)"
    assert str(nodes((2, 0))) == "1 node, 2 CPU cores, no GPU"


def test_the_memory_of_the_experiment_file_is_that_of_every_gpu() -> None:
    inventory = Inventory.assume(1, 2, device=device_named("H100-80GB")).with_gpu_memory(40)
    assert inventory.nodes[0].gpu_memory_bytes == 40 * 10**9
    content = {"name": "x", "grid": {"per_device_batch_size": 8}, "hardware": {"memory_gb": 40}}
    plan = make_plan(parse_experiment(content, source="x"), Inventory.assume(1, 2))
    assert plan.inventory.nodes[0].gpu_memory_bytes == 40 * 10**9
    assert nodes((2, 0)).with_gpu_memory(40).nodes[0].gpu_memory_bytes is None


def nodes(*cores_and_gpus: tuple[int, int]) -> Inventory:
    return Inventory(tuple(Node(str(i), str(i), str(i), cores, gpus) for i, (cores, gpus) in enumerate(cores_and_gpus)))


@pytest.mark.parametrize(
    ("inventory", "request_", "counts", "expected"),  # the device, its threads, and how many of it each node has
    [
        (nodes((2, 0)), "auto", [1, 2, 4, 8], ("cpu", 1, (2,))),
        (nodes((16, 0)), "auto", [1, 2, 4, 8], ("cpu", 2, (8,))),
        (nodes((16, 0)), "auto", [1], ("cpu", 16, (1,))),
        (nodes((6, 0)), "auto", [1, 4], ("cpu", 1, (6,))),
        (nodes((1, 0)), "auto", [2], ("cpu", 1, (1,))),
        (nodes((64, 8)), "auto", [1, 8], ("cuda", 8, (8,))),
        (nodes((16, 8)), "auto", [1, 8], ("cuda", 2, (8,))),
        (nodes((4, 8)), "auto", [1, 8], ("cuda", 1, (8,))),
        (nodes((64, 8)), "cpu", [1, 8], ("cpu", 8, (8,))),
        (nodes((64, 8), (64, 4)), "auto", [1], ("cuda", 8, (8, 4))),
        (nodes((8, 0), (4, 0)), "auto", [1, 4], ("cpu", 1, (8, 4))),
        (nodes((8, 0)), "cuda", [1], ("cuda", 1, (0,))),
    ],
)
def test_threads_and_slots(inventory: Inventory, request_: str, counts: list[int], expected: tuple[Any, ...]) -> None:
    machine = resolve(inventory, request=request_, device_counts=counts)
    assert (machine.device, machine.threads_per_device, machine.devices_per_node) == expected
    cores = [node.cores for node in inventory.nodes]  # Ray is never asked for more
    assert machine.device == "cpu" or machine.cpus_per_device * max(machine.devices_per_node) <= max(cores)


@pytest.mark.parametrize(
    ("devices", "fewest"), [(1, 1), (8, 1), (9, 3), (11, None), (10, 2), (16, 2), (20, None), (12, 2), (18, 3)]
)
def test_fewest_nodes(devices: int, fewest: int | None) -> None:
    machine = resolve(nodes((64, 8), (64, 8), (64, 6)), request="auto", device_counts=[1])
    assert machine.fewest_nodes(devices) == fewest


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
