"""What the doctor says of interfaces, shared memory, limits and niceness, from recorded environments."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.values import GIB
from harness.plan import checks


def interface(name: str = "eth0", speed: int | None = 10_000, mtu: int = 1500, errors: int = 0) -> dict[str, Any]:
    return {"name": name, "mbit_per_s": speed, "mtu": mtu, "errors": errors}


def node(host: str = "n0", *interfaces: dict[str, Any], used: str = "eth0", **facts: Any) -> Any:
    variables = {"GLOO_SOCKET_IFNAME": used, "NCCL_SOCKET_IFNAME": used}
    given = {"shared_memory_bytes": 8 * GIB, "limits": {"open files": 65536, "locked memory": None}, "niceness": 0}
    return {"host": host, "variables": variables, "interfaces": list(interfaces or [interface()]), **given, **facts}


def seen(*group: Any, severity: str = "warning") -> list[str]:
    return [finding.seen for finding in checks.judge_network(list(group)) if finding.severity == severity]


def test_each_node_of_several_has_a_note_on_its_interface() -> None:
    assert seen(node("n0"), node("n1", interface(speed=None, mtu=9000, errors=1)), severity="note") == [
        "n0: gloo and NCCL use eth0 (10000 Mbit/s, MTU 1500, 0 errors)",
        "n1: gloo and NCCL use eth0 (speed unknown, MTU 9000, 1 error)",
    ]
    assert checks.judge_network([node()]) == []  # ranks of one node use the loopback
    assert checks.judge_network([]) == []


@pytest.mark.parametrize(("speed", "warns"), [(19_000, False), (20_000, True), (None, False), (100, False)])
def test_a_slow_interface_beside_a_fast_one_is_a_warning(speed: int | None, warns: bool) -> None:
    found = seen(node("n0", interface(), interface("ib0", speed)), node("n1"))
    slow, fast = "eth0 (10000 Mbit/s, MTU 1500, 0 errors)", f"ib0 ({speed} Mbit/s, MTU 1500, 0 errors)"
    assert found == [f"n0: gloo and NCCL use {slow} beside {fast}"] * warns


RDMA = [{"name": "mlx5_0", "link_layer": "InfiniBand"}, {"name": "mlx5_1", "link_layer": "Ethernet"}]


def with_adapters(nccl: str | None = "2.29.3", adapters: Any = RDMA, **variables: str) -> list[str]:
    """Return the findings of two nodes, each with a slow interface beside a fast one."""
    one = node("n0", interface(), interface("ib0", 100_000), nccl=nccl, adapters=adapters)
    one["variables"] |= variables
    found = checks.judge_network([one, node("n1")])
    return [f"{each.severity}: {each.seen.split(' (10000')[0]}" for each in found][:-1]


def test_between_nodes_with_adapters_the_interface_is_no_link_of_nccls() -> None:
    nccl = "note: n0: NCCL uses mlx5_0 (InfiniBand), mlx5_1 (RoCE); eth0 is for the first contact of its ranks alone"
    assert with_adapters() == [nccl, "note: n0: gloo uses eth0"]
    (chosen, _) = with_adapters(NCCL_IB_HCA="mlx5_0", NCCL_IB_DISABLE="0")
    assert "mlx5_1 (RoCE) as NCCL_IB_HCA=mlx5_0 selects;" in chosen
    (plugin, _) = with_adapters(adapters=[{"name": "rdmap0s6", "link_layer": "Unspecified"}])
    assert "NCCL uses rdmap0s6 (by a plugin, if there is one);" in plugin


@pytest.mark.parametrize(
    ("facts", "users"),
    [
        ({"adapters": []}, "gloo and NCCL use"),
        ({"NCCL_IB_DISABLE": "1"}, "gloo and NCCL use"),
        ({"NCCL_NET": "Socket"}, "gloo and NCCL use"),
        ({"nccl": None}, "gloo uses"),  # no GPU: gloo knows no adapter
    ],
)
def test_without_adapters_for_nccl_a_slow_interface_is_a_warning(facts: dict[str, Any], users: str) -> None:
    assert with_adapters(**facts) == [f"note: n0: {users} eth0", f"warning: n0: {users} eth0"]


def test_two_libraries_may_have_two_interfaces() -> None:
    both = node("n0", interface(), interface("ib0", 100_000))
    both["variables"]["NCCL_SOCKET_IFNAME"] = "ib0"
    warnings = [finding for finding in checks.judge_network([both, node("n1")]) if finding.severity == "warning"]
    assert [finding.seen.split(" (")[0] for finding in warnings] == ["n0: gloo uses eth0"]
    assert warnings[0].advice.endswith("or set GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"shared_memory_bytes": 64 * 2**20}, "n0: 0.062 GiB of shared memory in /dev/shm"),
        ({"limits": {"open files": 1024, "locked memory": None}}, "n0: at most 1024 open files"),
        ({"niceness": 15}, "n0: ranks have niceness 15"),
    ],
)
def test_settings_of_one_node(facts: dict[str, Any], text: str) -> None:
    assert seen(node(**facts)) == [text]


def test_nodes_that_differ() -> None:
    others = node("n1", interface(mtu=9000), limits={"open files": 65536, "locked memory": 65536})
    assert seen(node("n0"), others) == [
        "limit of locked memory: unlimited on n0, 65536 on n1",
        "MTU of the ranks' interfaces: 1500 on n0, 9000 on n1",
    ]
