"""Settings of a machine on which speed depends: read from its files, judged with the command that changes each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.measure.environment import machine_state
from harness.plan.checks import judge_machine

QUIET: dict[str, Any] = {"governors": ["performance"], "boost": False, "periods": 1000, "throttled": 10}


def node(persistence: list[bool | None] | None = None, **state: Any) -> Any:
    return {"host": "n0", "state": {**QUIET, **state}, "topology": persistence and {"persistence": persistence}}


@pytest.mark.parametrize(
    ("facts", "seen", "advice"),
    [
        ({"governors": ["performance", "powersave"]}, "governor is powersave", "cpupower frequency-set"),
        ({"boost": True}, "the processors boost their clocks", "cpufreq/boost"),
        ({"throttled": 11}, "the container's CPU quota cut short 11 of 1,000 periods", "a higher CPU limit"),
        ({"persistence": [True, False, None, False]}, "persistence mode is off on GPU 1, 3", "nvidia-smi -pm 1"),
    ],
)
def test_each_setting_that_makes_speed_vary_is_one_finding_with_its_command(
    facts: dict[str, Any], seen: str, advice: str
) -> None:
    (found,) = judge_machine([node(**facts)])
    assert seen in found.seen and found.seen.startswith("n0: ") and advice in found.advice
    assert found.severity == ("warning" if "throttled" in facts else "note")


def test_a_quiet_machine_and_one_that_tells_nothing_have_no_finding() -> None:
    unknown = {"governors": [], "boost": None, "periods": None, "throttled": None}
    assert judge_machine([node(), node([True]), node(**unknown), {"host": "older"}]) == []  # type: ignore[typeddict-item]


def test_the_settings_are_those_of_the_system_s_files(tmp_path: Path) -> None:
    nothing = {"governors": [], "boost": None, "periods": None, "throttled": None}
    assert machine_state(tmp_path) == nothing
    files = {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpufreq/policy0": "",
        "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
        "sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 70\nnr_throttled 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = machine_state(tmp_path)
    assert read == {"governors": ["performance", "powersave"], "boost": True, "periods": 70, "throttled": 7}
    (tmp_path / "sys/devices/system/cpu/intel_pstate/no_turbo").write_text("1\n")
    assert machine_state(tmp_path)["boost"] is False
    (tmp_path / "sys/devices/system/cpu/cpufreq/boost").write_text("1\n")
    assert machine_state(tmp_path)["boost"] is True
