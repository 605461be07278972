"""Settings of a machine on which speed depends, each judged with the command that changes it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan.checks import judge_machine

QUIET: dict[str, Any] = {"governors": ["performance"], "boost": False, "periods": 1000, "throttled": 10}


def node(persistence: list[bool | None] | None = None, **state: Any) -> Any:
    return {"host": "n0", "state": {**QUIET, **state}, "topology": persistence and {"persistence": persistence}}


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
