"""Scripts after the patterns of public questions, written without knowledge of the checks: findings of the doctor."""

from __future__ import annotations

import pytest

from tests.doctor.conftest import Examined
from tests.doctor.scripts import FAULTS, SCRIPTS, Script
from tests.doctor.test_examine import NO_FINDING, checks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.__name__))
def test_faulty_scripts_have_findings_and_healthy_ones_none(examined: Examined, script: type[Script]) -> None:
    output = examined[f"{script.__name__} {script.strategy}"]
    named = checks(examined, f"{script.__name__} {script.strategy}")
    if script in FAULTS:
        assert FAULTS[script] in named
    else:
        assert named == [NO_FINDING] and "raised" not in output, output
