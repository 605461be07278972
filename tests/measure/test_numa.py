"""NUMA nodes, from a /sys that is made for the test, and this machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.measure.environment import numa_node_of_bus, numa_nodes


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes with processors, one with memory alone; a GPU on node 1, and one of which nothing is told."""
    for name, processors in {"node0": "0-31", "node10": "32-63", "node2": ""}.items():
        folder = tmp_path / "devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    for bus, node in {"0000:18:00.0": "1", "0001:af:00.0": "-1"}.items():
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_nodes_with_processors_in_their_order(system: Path) -> None:
    assert list(numa_nodes(system).items()) == [("0", "0-31"), ("10", "32-63")]


def test_another_system_has_none(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == {}


@pytest.mark.parametrize(
    ("bus", "node"),
    [("00000000:18:00.0", 1), ("0000:18:00.0", 1), ("00000001:AF:00.0", None), ("0:ff:00.0", None), ("", None)],
)
def test_the_node_of_a_gpu(system: Path, bus: str, node: int | None) -> None:
    assert numa_node_of_bus(bus, system) == node


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this kernel tells no NUMA nodes")
def test_this_machine_has_a_first_node() -> None:
    assert "0" in numa_nodes()
