"""Scripts after the patterns of public questions, written without knowledge of the checks: findings of the doctor."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.doctor.conftest import Told
from tests.doctor.scripts import SCRIPTS
from tests.doctor.test_examine import SILENCE, checks

pytestmark = pytest.mark.slow


def test_each_is_printed_with_what_was_said_of_it(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for script in SCRIPTS:
        findings = told[f"{script.__name__} {script.strategy}"]["findings"]
        said = [f"{f['severity']}, {f['check']}: {f['seen'][:110]}" for f in findings] or [SILENCE]
        lines += [f"{script.__name__:24} {script.strategy:7} {said[0]}", *(f"{'':33}{more}" for more in said[1:])]
    with capsys.disabled():
        sys.stdout.write("\n\n" + "\n".join(lines) + "\n")


FAULTS = {
    "PlainListOfLayers": "parameters move",
    "HiddenStatePassedIn": "shapes survive",
    "BufferReplacedInForward": "state in forward",
    "LossComputedInModel": "shapes survive",
    "PackedWithoutTotalLength": "shapes survive",
    "PositionsNotABuffer": "devices agree",
    "PoolerNeverUsed": "parameters move",
    "CallsThroughModule": "wrapped at all",
    "MeanTimesNothing": "loss and gradients scale",
    "OwnNumpyGenerator": "data is shared out",
    "ShardedTwice": "data is shared out",
    "LossMadeAnew": "parameters move",
    "SeededByRank": "randomness",
    "HeadMadeInForward": "parameters move",
}
"""The check that is to name what is wrong with a script; the others are unusual, and healthy."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.__name__))
def test_the_faulty_are_named_and_the_healthy_hear_nothing(told: Told, script: Any) -> None:
    said = told[f"{script.__name__} {script.strategy}"]
    named = checks(told, f"{script.__name__} {script.strategy}")
    if script.healthy:
        assert named == [SILENCE] and "raised" not in said, said
    else:
        assert FAULTS[script.__name__] in named
