"""Which variables of a process are recorded; this node's network and limits, with psutil's answers scripted."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.measure import environment
from harness.measure.environment import capture_environment

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
    answers: dict[str, Callable[..., object]] = {
        "net_if_stats": lambda: {**up, "eth1": state(up=False)},
        "net_if_addrs": lambda: {**addresses, "bond0": link_only},
        "net_io_counters": lambda pernic: {"eth0": counted},
    }
    monkeypatch.setattr(environment, "psutil", SimpleNamespace(**answers))
    assert environment.interfaces() == [
        {"name": "eth0", "mbit_per_s": 10_000, "mtu": 1500, "errors": 10},
        {"name": "ib0", "mbit_per_s": None, "mtu": 4092, "errors": None},
    ]


def test_this_node_has_facts_and_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft[number], soft[number]))
    assert environment.limits() == {"open files": 1024, "locked memory": None}
    assert all(each["name"] != "lo" and each["mtu"] > 0 for each in environment.interfaces())
    assert (environment.shared_memory_bytes() or 1) > 0
    monkeypatch.setattr(environment, "SHARED_MEMORY", "/no/such/folder")
    assert environment.shared_memory_bytes() is None


def adapter(root: Path, name: str, number: int, *, state: str, layer: str, opened: bool = True) -> None:
    port, verbs = root / f"sys/class/infiniband/{name}/ports/1", root / f"sys/class/infiniband_verbs/uverbs{number}"
    for folder in (port, verbs, root / "dev/infiniband"):
        folder.mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")
    (verbs / "ibdev").write_text(f"{name}\n")
    if opened:
        (root / f"dev/infiniband/uverbs{number}").touch()


def test_adapters_are_active_and_can_be_opened(tmp_path: Path) -> None:
    assert environment.adapters(tmp_path) == []
    adapter(tmp_path, "mlx5_1", 0, state="4: ACTIVE", layer="Ethernet")
    adapter(tmp_path, "mlx5_0", 1, state="4: ACTIVE", layer="InfiniBand")
    adapter(tmp_path, "mlx5_2", 2, state="1: DOWN", layer="InfiniBand")
    adapter(tmp_path, "mlx5_3", 3, state="4: ACTIVE", layer="InfiniBand", opened=False)  # a container without it
    assert environment.adapters(tmp_path) == [
        {"name": "mlx5_0", "link_layer": "InfiniBand"},
        {"name": "mlx5_1", "link_layer": "Ethernet"},
    ]
