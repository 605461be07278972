"""The doctor's findings on every workload of these tests, from real processes, once for all tests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.plan.checks import Finding

Examined = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    """The findings of the doctor for every workload, on one process and on two."""
    from tests.doctor.ranks import main
    from tests.worlds import fork_ranks

    folder = tmp_path_factory.mktemp("doctor")
    with ThreadPoolExecutor() as both:
        one, two = both.map(lambda world_size: fork_ranks(main, world_size, folder, within_s=500), (1, 2))
    found: Examined = json.loads(one.read_text()) | json.loads(two.read_text())
    return found


@pytest.fixture
def no_timed_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the checks that compare times: what else the machine does may make them speak of any workload."""
    monkeypatch.setattr("harness.doctor.speed.MARGIN", math.inf)
    monkeypatch.setattr("harness.doctor.speed.SLOW_OF_FEW", math.inf)


def only(found: Iterable[Finding], severity: str | None = None, **texts: str) -> Finding:
    """The one finding, of this severity, whose fields contain these texts."""
    (finding,) = found
    assert severity in (None, finding.severity), finding
    for field, text in texts.items():
        assert text in getattr(finding, field), finding
    return finding
