"""Scripts after the patterns of public questions, written without knowledge of the checks: findings of the doctor."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.doctor.conftest import Examined
from tests.doctor.scripts import SCRIPTS
from tests.doctor.test_examine import NO_FINDING, checks

pytestmark = pytest.mark.slow


def test_each_script_is_printed_with_its_findings(examined: Examined, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for script in SCRIPTS:
        findings = examined[f"{script.__name__} {script.strategy}"]["findings"]
        output = [f"{f['severity']}, {f['check']}: {f['seen'][:110]}" for f in findings] or [NO_FINDING]
        lines += [f"{script.__name__:24} {script.strategy:7} {output[0]}", *(f"{'':33}{more}" for more in output[1:])]
    with capsys.disabled():
        sys.stdout.write("\n\n" + "\n".join(lines) + "\n")


FAULTS = {
    "PlainListOfLayers": "parameter updates",
    "HiddenStatePassedIn": "output shapes",
    "BufferReplacedInForward": "state in forward",
    "LossComputedInModel": "output shapes",
    "PackedWithoutTotalLength": "output shapes",
    "PositionsNotABuffer": "device placement",
    "PoolerNeverUsed": "parameter updates",
    "CallsThroughModule": "wrapper use",
    "MeanTimesNothing": "gradient scaling",
    "OwnNumpyGenerator": "data sharding",
    "ShardedTwice": "data sharding",
    "LossMadeAnew": "parameter updates",
    "SeededByRank": "randomness",
    "HeadMadeInForward": "parameter updates",
}
"""The check that is to name what is wrong with a script; the others are unusual, and healthy."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.__name__))
def test_faulty_scripts_have_findings_and_healthy_ones_none(examined: Examined, script: Any) -> None:
    output = examined[f"{script.__name__} {script.strategy}"]
    named = checks(examined, f"{script.__name__} {script.strategy}")
    if script.healthy:
        assert named == [NO_FINDING] and "raised" not in output, output
    else:
        assert FAULTS[script.__name__] in named
