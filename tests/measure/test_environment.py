"""The facts of a node: variables, network and limits; what joins its GPUs, against a fake NVML and a made /sys."""

from __future__ import annotations

import resource
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.launch.worker import _link
from harness.measure import environment
from harness.measure.environment import capture_environment, numa_node_of_bus, numa_nodes
from tests.measure.nvml import FakeError, FakeNvml, answer

SPEED = {
    *("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"),
    *("CUBLASLT_WORKSPACE_SIZE", "TORCHINDUCTOR_MAX_AUTOTUNE", "FI_PROVIDER", "UCX_TLS", "KMP_AFFINITY"),
    *("TORCH_DISTRIBUTED_DEBUG", "NCCL_IB_DISABLE", "OMP_PROC_BIND", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
}
OTHER = {"CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "KMP_INIT_AT_FORK"}
"""Of the installation, or of one launch: these differ between worker groups, which would be a doubt for every pair."""


def test_variables_that_change_speed_are_recorded_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SPEED | OTHER:
        monkeypatch.setenv(name, "1")
    recorded = capture_environment("n", [torch.device("cpu")])["variables"]
    assert {name for name in SPEED | OTHER if recorded.get(name) == "1"} == SPEED


def state(up: bool = True, speed: int = 10_000, mtu: int = 1500, flags: str = "up") -> Any:
    return SimpleNamespace(isup=up, speed=speed, mtu=mtu, flags=flags)


def test_interfaces_with_an_address_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    up = {"lo": state(flags="up,loopback"), "eth0": state(), "ib0": state(speed=0, mtu=4092), "bond0": state()}
    internet = [SimpleNamespace(family=socket.AF_INET, address="10.0.0.1")]
    addresses = dict.fromkeys(("lo", "eth0", "eth1", "ib0", "gone"), internet)
    link_only = [SimpleNamespace(family=socket.AF_PACKET, address="00:11")]
    counted = SimpleNamespace(errin=1, errout=2, dropin=3, dropout=4)
    stats, found = (lambda: {**up, "eth1": state(up=False)}), (lambda: {**addresses, "bond0": link_only})
    answers = SimpleNamespace(net_if_stats=stats, net_if_addrs=found, net_io_counters=lambda pernic: {"eth0": counted})
    monkeypatch.setattr(environment, "psutil", answers)
    assert environment.interfaces() == [
        {"name": "eth0", "mbit_per_s": 10_000, "mtu": 1500, "errors": 10},
        {"name": "ib0", "mbit_per_s": None, "mtu": 4092, "errors": None},
    ]


def test_this_node_has_facts_and_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft[number], soft[number]))
    found = environment.capture_environment("n", [torch.device("cpu")])
    assert found["limits"] == {"open files": 1024, "locked memory": None}
    assert all(each["name"] != "lo" and each["mtu"] > 0 for each in environment.interfaces())
    assert (found["shared_memory_bytes"] or 1) > 0
    monkeypatch.setattr(environment, "SHARED_MEMORY", "/no/such/folder")
    assert environment.capture_environment("n", [torch.device("cpu")])["shared_memory_bytes"] is None


def adapter(root: Path, name: str, number: int, *states: str, layer: str, numa: str = "0", file: bool = True) -> None:
    """Make an adapter below root/sys as Linux does, with a port of each state, the later the faster."""
    device, verbs = root / f"sys/class/infiniband/{name}", root / f"sys/class/infiniband_verbs/uverbs{number}"
    for folder in (device / "device", verbs, root / "dev/infiniband"):
        folder.mkdir(parents=True, exist_ok=True)
    for port, state in enumerate(states, start=1):
        (device / f"ports/{port}").mkdir(parents=True)
        for what, text in (("state", state), ("link_layer", layer), ("rate", f"{port}00 Gb/sec (4X EDR)")):
            (device / f"ports/{port}" / what).write_text(f"{text}\n")
    (device / "device/numa_node").write_text(f"{numa}\n")
    (verbs / "ibdev").write_text(f"{name}\n")
    if file:
        (root / f"dev/infiniband/uverbs{number}").touch()


def test_adapters_have_the_state_and_rate_of_a_port_and_their_numa_node(tmp_path: Path) -> None:
    assert environment.adapters(tmp_path) == []
    adapter(tmp_path, "mlx5_10", 0, "4: ACTIVE", layer="Ethernet", numa="1")
    adapter(tmp_path, "mlx5_0", 1, "1: DOWN", "4: ACTIVE", layer="InfiniBand")
    adapter(tmp_path, "mlx5_2", 2, "1: DOWN", layer="InfiniBand", numa="-1")
    adapter(tmp_path, "mlx5_3", 3, "4: ACTIVE", layer="InfiniBand", file=False)  # a container without it
    adapter(tmp_path, "mlx5_4", 4, layer="InfiniBand", numa="")
    names = ("name", "link_layer", "state", "rate", "numa", "has_file", "nearest")
    assert environment.adapters(tmp_path) == [
        dict(zip(names, (*row, []), strict=True))
        for row in (
            ("mlx5_0", "InfiniBand", "ACTIVE", "200 Gb/sec (4X EDR)", 0, True),
            ("mlx5_2", "InfiniBand", "DOWN", "100 Gb/sec (4X EDR)", None, True),
            ("mlx5_3", "InfiniBand", "ACTIVE", "100 Gb/sec (4X EDR)", 0, False),
            ("mlx5_4", None, None, None, None, True),
            ("mlx5_10", "Ethernet", "ACTIVE", "100 Gb/sec (4X EDR)", 1, True),
        )
    ]


def test_gpus_below_the_bridge_of_an_adapter_are_nearest_to_it(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", 0, "4: ACTIVE", layer="InfiniBand")
    root, buses = tmp_path / "sys/devices/pci0000:00", ("0000:19:00.0", "0000:1a:00.0", "0000:2a:00.0", "0000:9a:00.0")
    places = ("0000:00:01.0/0000:17:00.0", "0000:00:01.0/0000:18:00.0", "0000:00:02.0", "../pci0000:80/0000:80:01.0")
    folder = tmp_path / "sys/bus/pci/devices"
    folder.mkdir(parents=True)
    for bus, place in zip(buses, places, strict=True):
        (root / place / bus).mkdir(parents=True)
        (folder / bus).symlink_to(root / place / bus)
    device = tmp_path / "sys/class/infiniband/mlx5_0/device"
    (device / "numa_node").unlink()
    device.rmdir()
    of_nvml = [f"0000{bus.upper()}" for bus in buses]
    for place, nearest in (
        ("0000:00:01.0/0000:18:00.0", [1]),
        ("0000:00:01.0", [0, 1]),  # beside a bridge that has both
        ("0000:00:03.0", [0, 1, 2]),  # at their root alone
        ("../pci0000:40/0000:40:00.0", []),
    ):
        (root / place / "0000:1b:00.0").mkdir(parents=True)
        device.symlink_to(root / place / "0000:1b:00.0")
        (found,) = environment.adapters(tmp_path, of_nvml)
        assert found["nearest"] == nearest, place
        device.unlink()


def test_nccls_files_set_what_the_environment_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# of all\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=WARN\nOTHER=1\n\n")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    assert environment.nccl_files(tmp_path) == {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"}
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_HCA = no\n NCCL_IB_HCA=^mlx5_9\n")
    assert environment.nccl_files(tmp_path)["NCCL_IB_HCA"] == "^mlx5_9"
    (tmp_path / "own").write_text("NCCL_NET=Socket")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "own"))
    assert environment.nccl_files(tmp_path) == {"NCCL_NET": "Socket", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"}


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
    nvmlDeviceGetPersistenceMode = staticmethod(lambda gpu: int(gpu.uuid != "GPU-b"))
    nvmlDeviceGetUUID = staticmethod(lambda gpu: gpu.uuid)
    nvmlDeviceGetPciInfo = staticmethod(lambda gpu: SimpleNamespace(busId=gpu.bus.encode()))
    nvmlDeviceGetNvLinkRemoteDeviceType = staticmethod(lambda gpu, link: 2 if gpu.links[link] == "switch" else 0)
    nvmlDeviceGetNvLinkRemotePciInfo = staticmethod(lambda gpu, link: SimpleNamespace(busId=gpu.links[link].upper()))


CARD = {
    "power_limit_w": 500.0,
    "usual_power_limit_w": 700.0,
    "ecc": True,
    "pcie_generation": 5,
    "pcie_width": 8,
    "most_pcie_width": 16,
}


class NvmlOfAnH100(LinkedNvml):
    """As pynvml answers: milliwatts, and the modes of ECC now and after a restart."""

    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda gpu: 500_000)
    nvmlDeviceGetPowerManagementDefaultLimit = staticmethod(lambda gpu: 700_000)
    nvmlDeviceGetEccMode = staticmethod(lambda gpu: [1, 0])
    nvmlDeviceGetMaxPcieLinkGeneration = staticmethod(lambda gpu: 5)
    nvmlDeviceGetCurrPcieLinkWidth = staticmethod(lambda gpu: 8)
    nvmlDeviceGetMaxPcieLinkWidth = staticmethod(lambda gpu: 16)


def test_the_limits_of_each_gpu_are_recorded_and_what_a_board_does_not_have_is_unknown() -> None:
    found = environment.capture_topology(NvmlOfAnH100(Gpu("GPU-a", "0:a"), Gpu("GPU-b", "0:b")))
    assert found and found["cards"] == [CARD, CARD]

    class WithoutEcc(NvmlOfAnH100):
        nvmlDeviceGetEccMode = staticmethod(lambda gpu: answer(FakeError("Not Supported")))

    found = environment.capture_topology(WithoutEcc(Gpu("GPU-a", "0:a")))
    assert found and found["cards"] == [{**CARD, "ecc": None}]


def captured(*gpus: Gpu, **facts: Any) -> dict[str, Any]:
    nvml = LinkedNvml(*gpus, **facts)
    found = environment.capture_topology(nvml)
    assert found and nvml.users == 0
    return found


def test_directly_linked_gpus_have_the_number_of_links_between_them() -> None:
    linked = {"a": ["0:b", "0:b", "", "0:c"], "b": ["0:a", "0:a"], "c": ["0:a"]}
    found = captured(*(Gpu(f"GPU-{gpu}", f"0:{gpu}", ends) for gpu, ends in linked.items()), levels={"0:b0:c": 20})
    links = [["X", "NV2", "NV1"], ["NV2", "X", "PXB"], ["NV1", "PXB", "X"]]
    gpus = {"gpus": ["GPU-a", "GPU-b", "GPU-c"], "numa": [None] * 3, "persistence": [True, False, True]}
    gpus["cards"] = [dict.fromkeys(CARD)] * 3
    assert found == {**gpus, "buses": ["0:a", "0:b", "0:c"], "links": links, "apart": [], "driver": "560.1"}


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
        folder = tmp_path / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    for bus, node in {"0000:18:00.0": "1", "0001:af:00.0": "-1"}.items():
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_nodes_with_processors_in_their_order(system: Path) -> None:
    assert list(numa_nodes(system).items()) == [("0", "0-31"), ("10", "32-63")]
    assert numa_nodes(system / "sys") == {}  # another system


@pytest.mark.parametrize(
    ("bus", "node"),
    [("00000000:18:00.0", 1), ("0000:18:00.0", 1), ("00000001:AF:00.0", None), ("0:ff:00.0", None), ("", None)],
)
def test_the_node_of_a_gpu(system: Path, bus: str, node: int | None) -> None:
    assert numa_node_of_bus(bus, system) == node


def test_the_settings_are_those_of_the_system_s_files(tmp_path: Path) -> None:
    nothing = {"governors": [], "boost": None, "periods": None, "throttled": None}
    assert environment.machine_state(tmp_path) == nothing
    cpu = tmp_path / "sys/devices/system/cpu"
    files = {
        cpu / "cpu0/cpufreq/scaling_governor": "powersave\n",
        cpu / "cpu1/cpufreq/scaling_governor": "performance\n",
    }
    files |= {cpu / "cpufreq/policy0": "", cpu / "intel_pstate/no_turbo": "0\n"}
    files[tmp_path / "sys/fs/cgroup/cpu.stat"] = "usage_usec 5\nnr_periods 70\nnr_throttled 7\n"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    read = environment.machine_state(tmp_path)
    assert read == {"governors": ["performance", "powersave"], "boost": True, "periods": 70, "throttled": 7}
    for name, boost in (("intel_pstate/no_turbo", False), ("cpufreq/boost", True)):
        (cpu / name).write_text("1\n")
        assert environment.machine_state(tmp_path)["boost"] is boost
