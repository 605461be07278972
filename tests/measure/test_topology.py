"""What joins the GPUs of a node, against a fake NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from harness.launch.worker import _link
from harness.measure import environment


class FakeError(Exception):
    """Stands for NVMLError."""


@dataclass
class Gpu:
    """``links``: where each NVLink leads: 'switch', another GPU's bus, or '' where it is down."""

    uuid: str
    bus: str
    links: list[str] = field(default_factory=list)


class FakeNvml:
    """A handle is the Gpu itself; ``levels``: the common ancestor of two buses, an exception where it is not told."""

    def __init__(self, *gpus: Gpu, levels: dict[str, Any] | None = None, driver: bool = True, apart: Any = ()) -> None:
        self.gpus, self.levels, self.driver, self.users, self.apart = gpus, levels or {}, driver, 0, apart

    def nvmlInit(self) -> None:
        if not self.driver:
            raise FakeError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"560.1"

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, what: int) -> int:
        return 5 if what == 0 and one.bus + other.bus in self.apart else 0

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: Gpu) -> Any:
        return SimpleNamespace(busId=handle.bus.encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Gpu, other: Gpu) -> int:
        level = self.levels.get(one.bus + other.bus, FakeError("Not Supported"))
        if isinstance(level, Exception):
            raise level
        return int(level)

    def nvmlDeviceGetNvLinkState(self, handle: Gpu, link: int) -> int:
        if link >= len(handle.links):
            raise FakeError("Invalid Argument")
        return int(bool(handle.links[link]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Gpu, link: int) -> int:
        return 2 if handle.links[link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Gpu, link: int) -> Any:
        return SimpleNamespace(busId=handle.links[link].upper())


def captured(*gpus: Gpu, **facts: Any) -> dict[str, Any]:
    nvml = FakeNvml(*gpus, **facts)
    found = environment.capture_topology(nvml)
    assert nvml.users == 0
    assert found
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


def test_gpus_without_peer_access_are_reported() -> None:
    found = captured(Gpu("GPU-a", "0:a"), Gpu("GPU-b", "0:b"), apart={"0:a0:b"})
    assert found["apart"] == [[0, 1]]


def test_switched_gpus_have_the_smaller_number_of_links_of_both() -> None:
    found = captured(Gpu("GPU-a", "0:a", ["switch"] * 12), Gpu("GPU-b", "0:b", ["switch"] * 11 + [""]))
    assert found["links"][0][1] == "NV11"


@pytest.mark.parametrize(
    ("level", "name"),
    [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (60, None), (FakeError(), None)],
)
def test_pcie_links_are_named_by_the_common_ancestor(level: Any, name: str | None) -> None:
    assert captured(Gpu("GPU-a", "0:a"), Gpu("GPU-b", "0:b"), levels={"0:a0:b": level})["links"][0][1] == name


@pytest.mark.parametrize("break_it", [lambda: FakeNvml(driver=False), object])
def test_without_nvml_there_is_no_topology(break_it: Callable[[], Any]) -> None:
    assert environment.capture_topology(break_it()) is None


FOUR = {
    "gpus": ["GPU-a", "GPU-b", "GPU-c", "GPU-d"],
    "links": [
        ["X", "NV12", "SYS", None],
        ["NV12", "X", "PIX", "SYS"],
        ["SYS", "PIX", "X", "SYS"],
        [None, "SYS", "SYS", "X"],
    ],
}


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
    assert environment.format_links(["SYS", "NV4", "PIX", "NV12", "SYS", "NODE", "PHB", "PXB"]) == (
        "NV12, NV4, PIX, PXB, PHB, NODE, SYS"
    )
    assert environment.format_links([]) is None


def node_of(node: str, *uuids: str, known: Any = FOUR) -> dict[str, Any]:
    return {"node_id": node, "topology": known, "devices": [{"uuid": uuid} for uuid in uuids]}


def test_a_group_has_the_links_inside_each_of_its_nodes() -> None:
    assert _link([node_of("n0", "a"), node_of("n0", "b")]) == "NV12"
    assert _link([node_of("n0", "a", "b")]) == "NV12"
    both = [node_of("n0", "a"), node_of("n1", "b"), node_of("n0", "b"), node_of("n1", "c")]
    assert _link(both) == "NV12, PIX"
    assert _link([node_of("n0", "a"), node_of("n1", "a")]) is None
    assert _link([node_of("n0", "a", "b"), node_of("n1", "a", "b", known=None)]) is None
