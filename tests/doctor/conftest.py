"""What the doctor says of every workload of these tests, from real processes, once for all tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the doctor said of every workload, on one process and on two."""
    folder = tmp_path_factory.mktemp("doctor")
    found: Told = {}
    for world_size in (1, 2):
        store, out = folder / f"store{world_size}", folder / f"out{world_size}"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.doctor.ranks", str(rank), str(world_size), str(store), str(out)], cwd=ROOT
            )
            for rank in range(world_size)
        ]
        assert [process.wait(timeout=400) for process in ranks] == [0] * world_size
        found |= json.loads(out.read_text())
    return found
