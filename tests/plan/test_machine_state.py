"""Settings of a machine on which speed depends, each judged with the command that changes it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan.checks import judge_machine

QUIET: dict[str, Any] = {"governors": ["performance"], "boost": False, "periods": 1000, "throttled": 10}


def node(persistence: list[bool | None] | None = None, **state: Any) -> Any:
    return {"host": "n0", "state": {**QUIET, **state}, "topology": persistence and {"persistence": persistence}}


CARD: dict[str, Any] = {"power_limit_w": 700.0, "usual_power_limit_w": 700.0, "ecc": True, "pcie_generation": 5}
CARD |= {"pcie_width": 16, "most_pcie_width": 16}


@pytest.mark.parametrize(
    ("other", "seen", "advice"),
    [
        ({}, None, ""),
        (dict.fromkeys(CARD), None, ""),
        ({"power_limit_w": 500.0}, "n0: the power limit of GPU 1 is 500 W of 700 W", "nvidia-smi -pl"),
        ({"pcie_width": 8}, "n0: GPU 1 uses 8 of 16 PCIe lanes", "another slot"),
        ({"ecc": False}, "n0: ECC is off on GPU 1 alone", "nvidia-smi -e 1"),
    ],
)
def test_what_limits_one_gpu_of_a_node_is_a_finding(other: dict[str, Any], seen: str | None, advice: str) -> None:
    found = judge_machine([{"host": "n0", "topology": {"cards": [CARD, CARD | other]}}])  # type: ignore[list-item, typeddict-item]
    assert [one.seen for one in found] == ([seen] if seen else [])
    assert all(advice in one.advice for one in found)
    alike = judge_machine([{"host": "n0", "topology": {"cards": [CARD | {"ecc": False}] * 2}}])  # type: ignore[list-item, typeddict-item]
    assert alike == []


@pytest.mark.parametrize(
    ("facts", "seen", "advice"),
    [
        ({"governors": ["performance", "powersave"]}, "governor is powersave", "cpupower frequency-set"),
        ({"boost": True}, "the processors boost their clocks", "cpufreq/boost"),
        ({"throttled": 11}, "the container's CPU quota has cut short 11 of 1,000 periods", "a higher CPU limit"),
        ({"persistence": [True, False, None, False]}, "persistence mode is off on GPU 1, 3", "nvidia-smi -pm 1"),
    ],
)
def test_each_setting_that_makes_speed_vary_has_its_command(facts: dict[str, Any], seen: str, advice: str) -> None:
    (found,) = judge_machine([node(**facts)])
    assert seen in found.seen and found.seen.startswith("n0: ") and advice in found.advice
    assert found.severity == "note"


def test_a_quiet_machine_and_one_that_tells_nothing_have_no_finding() -> None:
    unknown = {"governors": [], "boost": None, "periods": None, "throttled": None}
    assert judge_machine([node(), node([True]), node(**unknown), {"host": "older"}]) == []  # type: ignore[typeddict-item]
    assert judge_machine([node([True], boost=True)]) == []  # training on GPUs does not share the processors' power
