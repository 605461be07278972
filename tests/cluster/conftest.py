"""What the tests of clusters share: machines made of namespaces, and a skip where there can be none."""

from __future__ import annotations

import pytest

from tests.cluster.machines import why_not


@pytest.fixture(scope="session", autouse=True)
def _needs_machines() -> None:
    if reason := why_not():
        pytest.skip(reason)
