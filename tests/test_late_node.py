"""A cluster whose head has no device: nothing can run, until a node joins that the run waits for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.listening import free_port
from tests.processes import ROOT, RUN
from tests.ray_nodes import ended_afterwards, own_variables, start_node

pytestmark = pytest.mark.slow

HEAD, OTHER = "127.0.0.4", "127.0.0.5"
EXPERIMENT = """
name: late
workload: emulated_compute
workload_options: {mebibytes: 0.1, step_ms: 2}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
exclude: [{strategy: ddp, devices: 1}, {strategy: single, devices: 2}]
throughput: {blocks: 1, warmup_steps: 2, windows: 1, window_steps: 4, window_seconds: 0, twin: false, explain: false}
equivalence: false
preflight: false
cluster: {wait_for: 2m}
"""


class Head:
    """A head without devices, to which a node of two CPUs may be added."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables, self.port = {**variables, "PYTHONPATH": str(ROOT)}, free_port(HEAD)
        place = ("--head", f"--node-ip-address={HEAD}", f"--port={self.port}", "--num-cpus=0")
        start_node(*place, "--include-dashboard=false", variables=self.variables)

    def add_node(self) -> None:
        place = (f"--address={HEAD}:{self.port}", f"--node-ip-address={OTHER}", "--num-cpus=2")
        start_node(*place, variables=self.variables)

    def start(self, home: Path) -> subprocess.Popen[str]:
        """Start a run that waits for nodes; its messages can be read from its output."""
        (home / "late.yaml").write_text(EXPERIMENT)
        command = [*RUN, "late.yaml", "--address", f"{HEAD}:{self.port}", "--quiet"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.variables, cwd=home, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    variables = own_variables()
    with ended_afterwards(variables["RAY_AUTH_TOKEN"]):
        yield Head(variables)


def test_a_node_that_joins_late_is_in_the_plan(head: Head, tmp_path: Path) -> None:
    """After a wait in vain what fits is run, and if nothing does, nothing: tests/run/test_growth.py and test_api.py."""
    run = head.start(tmp_path)
    try:
        first = "Waiting at most 120 s for nodes: 2 cells cannot run yet; too few devices: needs 2 on one"
        assert run.stdout and run.stdout.readline().startswith(first)
        head.add_node()
        output, error = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 0, output + error
    assert "no more to wait for: 1 node, " in output
    (folder,) = (tmp_path / "results/late").iterdir()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"} and set(results.trials["devices"]) == {1, 2}
