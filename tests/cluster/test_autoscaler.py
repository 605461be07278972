"""A cluster that grows: Ray's own autoscaler brings the nodes that a run requests, and takes them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.cluster.autoscaler import seen, start_head, watching
from tests.cluster.machines import Machine, machines, new_token, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

EXPERIMENT = """
name: grows
workload: emulated_compute
workload_options: {mebibytes: 0.1, step_ms: 5}
grid: {strategy: [single, ddp], devices: [1, 2, 8], per_device_batch_size: 8}
exclude: [{strategy: ddp, devices: 1}, {strategy: single, devices: [2, 8]}]
throughput: {blocks: 1, warmup_steps: 2, windows: 1, window_steps: 4, window_seconds: 0, twin: false, explain: false}
equivalence: false
preflight: false
cluster: {wait_for: 2m}
"""
NEEDED = 2
"""Of the CPUs that the largest cell needs which the autoscaler can bring."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machines(tmp_path_factory.mktemp("grows"), 1, **new_token()) as (made,):
        yield made


def test_nodes_come_are_held_through_every_group_and_go(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "grows.yaml").write_text(EXPERIMENT)
    log = tmp_path / "asked"
    address = start_head(machine, cpus=1, most=2, idle_minutes=0.1)
    with watching(machine, log):
        wait_for(lambda: seen(log), 60)
        command = ["python", "-m", "harness.run", "grows.yaml", "--address", address]
        output = machine.run(*command, cwd=tmp_path, timeout=300)
        ended = len(seen(log))
        wait_for(lambda: seen(log)[-1]["alive"] == 1, 60, lambda: seen(log)[-1])
    (folder,) = (tmp_path / "results/grows").iterdir()
    results = harness.load(folder)
    outcomes = results.trials.set_index("devices")["outcome"].to_dict()
    assert outcomes == {1: "ok", 2: "ok", 8: "skipped"}, output
    assert "Waiting at most 120 s for nodes: 2 cells cannot run yet" in output
    assert "The autoscaler cannot bring 8 times 1 device" in output and "no more to wait for: 2 nodes" in output
    during = [len(each["asked"]) for each in seen(log)[:ended]]
    held = during[during.index(NEEDED) :]
    withdrawn = held.index(0) if 0 in held else len(held)
    # as many before, inside and between worker groups, though Ray Train knows how to request its own
    assert set(held[:withdrawn]) == {NEEDED} and set(held[withdrawn:]) <= {0}
    assert seen(log)[-1]["asked"] == []
