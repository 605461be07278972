"""What joins the GPUs of a node, against a fake NVML; its NUMA nodes, from a /sys that is made for the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.launch.worker import _link
from harness.measure import environment
from harness.measure.environment import numa_node_of_bus, numa_nodes
from tests.measure.nvml import FakeError, FakeNvml, answer


@dataclass
class Gpu:
    """``links``: where each NVLink leads: 'switch', another GPU's bus, or '' where it is down."""

    uuid: str
    bus: str
    links: list[str] = field(default_factory=list)


class LinkedNvml(FakeNvml):
    """A handle is the Gpu itself; ``levels``: the common ancestor of two buses, an exception where it is not told."""

    def __init__(self, *gpus: Gpu, levels: dict[str, Any] | None = None, driver: bool = True, apart: Any = ()) -> None:
        super().__init__(driver=driver)
        self.gpus, self.levels, self.apart = gpus, levels or {}, apart

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, what: int) -> int:
        return 5 if what == 0 and one.bus + other.bus in self.apart else 0

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Gpu, other: Gpu) -> int:
        return int(answer(self.levels.get(one.bus + other.bus, FakeError("Not Supported"))))

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        return int(bool(gpu.links[link])) if link < len(gpu.links) else answer(FakeError("Invalid Argument"))

    nvmlSystemGetDriverVersion = staticmethod(lambda: b"560.1")
    nvmlDeviceGetUUID = staticmethod(lambda gpu: gpu.uuid)
    nvmlDeviceGetPciInfo = staticmethod(lambda gpu: SimpleNamespace(busId=gpu.bus.encode()))
    nvmlDeviceGetNvLinkRemoteDeviceType = staticmethod(lambda gpu, link: 2 if gpu.links[link] == "switch" else 0)
    nvmlDeviceGetNvLinkRemotePciInfo = staticmethod(lambda gpu, link: SimpleNamespace(busId=gpu.links[link].upper()))


def captured(*gpus: Gpu, **facts: Any) -> dict[str, Any]:
    nvml = LinkedNvml(*gpus, **facts)
    found = environment.capture_topology(nvml)
    assert found and nvml.users == 0
    return found


def test_directly_linked_gpus_have_the_number_of_links_between_them() -> None:
    found = captured(
        Gpu("GPU-a", "0:a", ["0:b", "0:b", "", "0:c"]),
        Gpu("GPU-b", "0:b", ["0:a", "0:a"]),
        Gpu("GPU-c", "0:c", ["0:a"]),
        levels={"0:b0:c": 20},
    )
    assert found == {
        "gpus": ["GPU-a", "GPU-b", "GPU-c"],
        "links": [["X", "NV2", "NV1"], ["NV2", "X", "PXB"], ["NV1", "PXB", "X"]],
        "apart": [],
        "numa": [None, None, None],
        "driver": "560.1",
    }


def test_switched_gpus_have_the_smaller_number_of_links_of_both_and_some_no_peer_access() -> None:
    gpus = (Gpu("GPU-a", "0:a", ["switch"] * 12), Gpu("GPU-b", "0:b", ["switch"] * 11 + [""]))
    found = captured(*gpus, apart={"0:a0:b"})
    assert found["links"][0][1] == "NV11" and found["apart"] == [[0, 1]]


@pytest.mark.parametrize(
    ("level", "name"),
    [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (60, None), (FakeError(), None)],
)
def test_pcie_links_are_named_by_the_common_ancestor(level: Any, name: str | None) -> None:
    assert captured(Gpu("GPU-a", "0:a"), Gpu("GPU-b", "0:b"), levels={"0:a0:b": level})["links"][0][1] == name


@pytest.mark.parametrize("nvml", [LinkedNvml(driver=False), object()])
def test_without_nvml_there_is_no_topology(nvml: Any) -> None:
    assert environment.capture_topology(nvml) is None


LINKS = [["X", "NV12", "SYS", None], ["NV12", "X", "PIX", "SYS"], ["SYS", "PIX", "X", "SYS"], [None, "SYS", "SYS", "X"]]
FOUR = {"gpus": [f"GPU-{name}" for name in "abcd"], "links": LINKS}


@pytest.mark.parametrize(
    ("uuids", "links"),
    [
        (["a", "b"], ["NV12"]),
        (["GPU-b", "GPU-a"], ["NV12"]),
        (["a", "b", "c"], ["NV12", "SYS", "PIX"]),
        (["a"], []),
        (["a", "a"], []),
        (["a", "d"], None),
        (["a", "MIG-x"], None),
        (["a", None], None),
    ],
)
def test_the_links_between_some_of_them(uuids: list[str | None], links: list[str] | None) -> None:
    assert environment.links_between(FOUR, uuids) == links
    assert environment.links_between(None, uuids) is None


def test_distinct_links_are_named_best_first() -> None:
    found = environment.format_links(["SYS", "NV4", "PIX", "NV12", "SYS", "NODE", "PHB", "PXB"])
    assert found == "NV12, NV4, PIX, PXB, PHB, NODE, SYS" and environment.format_links([]) is None


def node_of(node: str, *uuids: str, known: Any = FOUR) -> dict[str, Any]:
    return {"node_id": node, "topology": known, "devices": [{"uuid": uuid} for uuid in uuids]}


def test_a_group_has_the_links_inside_each_of_its_nodes() -> None:
    assert _link([node_of("n0", "a"), node_of("n0", "b")]) == "NV12"
    assert _link([node_of("n0", "a", "b")]) == "NV12"
    both = [node_of("n0", "a"), node_of("n1", "b"), node_of("n0", "b"), node_of("n1", "c")]
    assert _link(both) == "NV12, PIX"
    assert _link([node_of("n0", "a"), node_of("n1", "a")]) is None
    assert _link([node_of("n0", "a", "b"), node_of("n1", "a", "b", known=None)]) is None


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
    assert numa_nodes(system / "devices") == {}  # another system


@pytest.mark.parametrize(
    ("bus", "node"),
    [("00000000:18:00.0", 1), ("0000:18:00.0", 1), ("00000001:AF:00.0", None), ("0:ff:00.0", None), ("", None)],
)
def test_the_node_of_a_gpu(system: Path, bus: str, node: int | None) -> None:
    assert numa_node_of_bus(bus, system) == node
