"""A cluster with another version of Ray: one line, exit code 2, and nothing is shipped or left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import ROOT, Machine, machines, new_token

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OLDER = """
import ray, sys
ray.__version__ = "2.59.0"
from ray.scripts.scripts import main
sys.argv[1:] = ["start", "--head", "--node-ip-address=10.77.0.1", "--port=6379", "--num-cpus=1",
    "--include-dashboard=false", "--disable-usage-stats"]
main()
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A head that says it is of another version of Ray."""
    with machines(tmp_path_factory.mktemp("older"), 1, **new_token()) as (machine,):
        machine.run("python", "-c", OLDER, cwd=Path("/"))
        yield machine


def test_another_version_of_ray_is_named(older: Machine, tmp_path: Path) -> None:
    command = ["python", "-m", "harness.run", str(ROOT / "experiments/smoke.yaml"), "--address", "10.77.0.1:6379"]
    before = {process.pid for process in older.processes()}
    output = older.run("bash", "-c", f"{' '.join(command)}; echo code $?", cwd=tmp_path)
    assert output.rstrip().endswith("code 2"), output
    assert not list(tmp_path.iterdir())
    assert {process.pid for process in older.processes()} <= before
    line, _ = output.rstrip().splitlines()
    assert "the cluster has Ray 2.59.0 and Python" in line and "nothing was shipped" in line
