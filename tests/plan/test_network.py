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


def adapter(name: str = "mlx5_0", **facts: Any) -> dict[str, Any]:
    kind = {"link_layer": "InfiniBand", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
    return {"name": name, **kind, "numa": None, "has_file": True, **facts}


RDMA = [adapter(), adapter("mlx5_1", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")]


def with_adapters(nccl: str | None = "2.29.3", adapters: Any = RDMA, numa: Any = None, **variables: str) -> list[str]:
    """Return the findings of two nodes, each with a slow interface beside a fast one."""
    topology = {"numa": numa} if numa else None
    one = node("n0", interface(), interface("ib0", 100_000), nccl=nccl, adapters=adapters, topology=topology)
    one["variables"] |= variables
    found = checks.judge_network([one, node("n1")])
    return [f"{each.severity}: {each.seen.split(' (10000')[0]}" for each in found][:-1]


FIRST_CONTACT = "; eth0 is for the first contact of its ranks alone"


def test_between_nodes_with_adapters_the_interface_is_no_link_of_nccls() -> None:
    infiniband, roce = "InfiniBand at 400 Gb/sec (4X NDR): mlx5_0", "RoCE at 100 Gb/sec (4X EDR): mlx5_1"
    both = f"note: n0: NCCL uses {infiniband}; {roce}{FIRST_CONTACT}"
    assert with_adapters() == with_adapters(NCCL_IB_DISABLE="0", NCCL_NET="IB") == [both, "note: n0: gloo uses eth0"]
    used, unused, _ = with_adapters(NCCL_IB_HCA="=mlx5_0")
    assert used == f"note: n0: NCCL uses {infiniband}{FIRST_CONTACT}"
    assert unused == "note: n0: NCCL does not use mlx5_1: NCCL_IB_HCA==mlx5_0"
    (plugin, _) = with_adapters(adapters=[adapter("rdmap0s6", link_layer="Unspecified", rate=None)])
    assert "NCCL uses a network of its own plugin, if there is one, at an unknown rate: rdmap0s6;" in plugin


def test_adapters_stand_by_their_numa_node_beside_its_gpus() -> None:
    adapters = [adapter(f"mlx5_{number}", numa=number // 2) for number in range(4)]
    (used, *_) = with_adapters(adapters=adapters, numa=[0, 0, 0, 0])
    places = "mlx5_0, mlx5_1 at NUMA node 0 (GPU 0, 1, 2, 3), mlx5_2, mlx5_3 at NUMA node 1"
    assert used == f"note: n0: NCCL uses InfiniBand at 400 Gb/sec (4X NDR): {places}{FIRST_CONTACT}"


def test_adapters_stand_by_the_nearest_gpus_if_those_are_known() -> None:
    adapters = [adapter(f"mlx5_{number}", numa=0, nearest=[number]) for number in range(2)]
    (used, *_) = with_adapters(adapters=adapters, numa=[0, 0])
    places = "mlx5_0 at NUMA node 0 (GPU 0), mlx5_1 at NUMA node 0 (GPU 1)"
    assert used == f"note: n0: NCCL uses InfiniBand at 400 Gb/sec (4X NDR): {places}{FIRST_CONTACT}"


@pytest.mark.parametrize(
    ("logged", "adapters", "found"),
    [
        ("IB: mlx5_0:1/IB", [RDMA[0]], ["note: n0: NCCL uses IB: mlx5_0:1/IB, by its log", "note: n0: gloo uses eth0"]),
        ("AWS Libfabric", [], ["note: n0: NCCL uses AWS Libfabric, by its log", "note: n0: gloo uses eth0"]),
        (
            "Socket: eth0",
            [RDMA[0]],
            [
                "note: n0: NCCL uses Socket: eth0, by its log",
                "warning: n0: NCCL does not use mlx5_0: its log names sockets",
                "note: n0: gloo and NCCL use eth0",
                "warning: n0: gloo and NCCL use eth0",  # beside a faster one
            ],
        ),
    ],
)
def test_what_nccls_log_names_comes_before_what_its_variables_select(
    logged: str, adapters: Any, found: list[str]
) -> None:
    one = node("n0", interface(), interface("ib0", 100_000), nccl="2.29.3", adapters=adapters, nccl_network=logged)
    said = [f"{each.severity}: {each.seen.split(' (10000')[0]}" for each in checks.judge_network([one, node("n1")])]
    assert said[:-1] == found


@pytest.mark.parametrize(
    ("selection", "used"),
    [
        ("", [1, 10]),
        ("mlx5_1", [1, 10]),  # a prefix
        ("=mlx5_1", [1]),
        ("=mlx5_1:1,mlx5_2:1", [1]),
        ("^=mlx5_1", [10]),
        ("^mlx5", []),
        ("mlx4,mlx5_10", [10]),
    ],
)
def test_adapters_are_selected_by_prefixes_or_names(selection: str, used: list[int]) -> None:
    assert [number for number in (1, 10) if checks._selected(f"mlx5_{number}", selection)] == used


@pytest.mark.parametrize(
    ("facts", "users", "unused"),
    [
        ({"adapters": []}, "gloo and NCCL use", None),
        (
            {"NCCL_IB_DISABLE": "1"},
            "gloo and NCCL use",
            "note: n0: NCCL does not use mlx5_0, mlx5_1: NCCL_IB_DISABLE=1",
        ),
        ({"NCCL_NET": "Socket"}, "gloo and NCCL use", "note: n0: NCCL does not use mlx5_0, mlx5_1: NCCL_NET=Socket"),
        (
            {"adapters": [adapter(has_file=False)]},
            "gloo and NCCL use",
            "warning: n0: NCCL does not use mlx5_0: its device file is not in /dev/infiniband",
        ),
        (
            {"adapters": [adapter(state="DOWN")]},
            "gloo and NCCL use",
            "note: n0: NCCL does not use mlx5_0: its port is DOWN",
        ),
        ({"nccl": None}, "gloo uses", None),  # no GPU: gloo knows no adapter
    ],
)
def test_without_adapters_for_nccl_a_slow_interface_is_a_warning(
    facts: dict[str, Any], users: str, unused: str | None
) -> None:
    found = [f"note: n0: {users} eth0", f"warning: n0: {users} eth0"]
    assert with_adapters(**facts) == ([unused] if unused else []) + found


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


def test_adapters_of_an_earlier_run_whose_state_is_not_known_are_used_as_before() -> None:
    found = with_adapters(adapters=[{"name": "mlx5_0", "link_layer": "InfiniBand"}])
    assert "NCCL uses InfiniBand at an unknown rate: mlx5_0" in found[0]
