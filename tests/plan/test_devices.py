"""The table of known GPUs, and the names that are refused."""

from __future__ import annotations

import pytest

from harness.analysis.hardware import _TABLE
from harness.plan.inventory import KNOWN_DEVICES, Inventory, device_named, device_of_driver


def test_the_name_of_a_device_ends_with_its_memory_or_its_board() -> None:
    for name, device in KNOWN_DEVICES.items():
        assert f"-{device.gb}GB" in name and device.source
    drivers = [driver for device in KNOWN_DEVICES.values() for driver in device.drivers]
    assert len(drivers) == len({*drivers})


def test_upper_and_lower_case_name_the_same_device() -> None:
    assert device_named("a100-40gb") is KNOWN_DEVICES["A100-40GB"]
    assert device_named("A100-40GB").memory_bytes == 40_000_000_000


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


def test_a_driver_s_name_finds_its_device() -> None:
    found = device_of_driver("NVIDIA H100 80GB HBM3")
    assert found and found.name == "H100-80GB"
    assert device_of_driver("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_every_device_with_a_published_peak_is_known() -> None:
    assert [model for model in _TABLE if device_of_driver(model) is None] == []


def test_an_assumed_device_is_that_of_every_node() -> None:
    inventory = Inventory.assume(2, 8, device=device_named("H100-80GB"))
    assert {(node.gpu_model, node.gpu_memory_bytes) for node in inventory.nodes} == {("H100-80GB", 80 * 10**9)}
    assert str(inventory) == "assumed: 2 nodes, 128 CPU cores, 16 GPUs (H100-80GB)"
