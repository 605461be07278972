"""The network between two machines: slower and slower, down for a while, and down for good."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from harness.analysis.results import Results
from tests.cluster.machines import Machine, machines, new_token, start_ray, wait_for, why_not

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

EXPERIMENT = """
name: links
workload: emulated_compute
workload_options: {{mebibytes: 1, step_ms: 5}}
grid: {{strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}}
exclude: [{{strategy: single, devices: 2}}, {{strategy: ddp, devices: 1}}]
throughput: {{blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: {windows}, window_steps: 4,
  window_seconds: {seconds}, twin: false, explain: {explain}, links_seconds: 0}}
equivalence: false
preflight: false
limits: {{trial: 60s, attempts: 1}}
"""
RATES = (400, 25)
"""Of the link, in Mbit/s: the exchange of a step's 1 MiB takes about 20 and 330 ms."""
TBF = ("burst", "64kb", "latency", "400ms")
DOWN_S = 20
BUSY_BYTES = 50_000
"""Of one direction of the link in half a second, while ranks train; Ray's own messages are fewer."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Machine]]:
    """A head and a second node of one CPU each."""
    if reason := why_not(f"ip link add v0 type veth peer v1; tc qdisc add dev v0 root tbf {' '.join(TBF)} rate 25mbit"):
        pytest.skip(reason)
    folder = tmp_path / "machines"
    folder.mkdir()
    with machines(folder, 2, **new_token()) as (head, other):
        start_ray(head, "--include-dashboard=false")
        start_ray(other, head=head)
        yield [head, other]


def command(home: Path, *, windows: int, seconds: float, explain: bool = False) -> list[str]:
    """The command that runs the experiment, with these windows."""
    text = EXPERIMENT.format(windows=windows, seconds=seconds, explain=str(explain).lower())
    (home / "links.yaml").write_text(text)
    return ["python", "-m", "harness.run", "links.yaml", "--address", "10.77.0.1:6379"]


def newest(home: Path) -> Results:
    return harness.load(max((home / "results/links").iterdir(), key=lambda path: path.stat().st_mtime))


def start_training(nodes: list[Machine], home: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a run of two long windows and wait until ranks have exchanged gradients for three seconds, as in one."""
    run = nodes[0].start(*command(home, windows=2, seconds=10.0), log=log, cwd=home)
    wait_for(lambda: all(is_busy(nodes[1]) for _ in range(6)), 180, log.read_text)
    return run


def sent_bytes(machine: Machine) -> int:
    """Return what a machine has sent over the link."""
    (link,) = json.loads(machine.run("ip", "-s", "-j", "link", "show", machine.link))
    return int(link["stats64"]["tx"]["bytes"])


def is_busy(machine: Machine) -> bool:
    before = sent_bytes(machine)
    time.sleep(0.5)
    return sent_bytes(machine) - before > BUSY_BYTES


def set_link(machine: Machine, state: str) -> None:
    machine.run("ip", "link", "set", machine.link, state)


def test_a_slower_link_shows_as_exposed_communication(nodes: list[Machine], tmp_path: Path) -> None:
    exposed = []
    for rate in RATES:
        for machine in nodes:
            machine.run("tc", "qdisc", "replace", "dev", machine.link, "root", "tbf", *TBF, "rate", f"{rate}mbit")
        nodes[0].run(*command(tmp_path, windows=1, seconds=1.0, explain=True), cwd=tmp_path, timeout=240)
        results = newest(tmp_path)
        assert set(results.trials["outcome"]) == {"ok"}
        parts = results.waterfall.set_index("part")["part_s"]
        exposed.append(float(parts["exposed communication"]))
    print("exposed communication by rate:", dict(zip(RATES, exposed, strict=True)))
    assert exposed[-1] > 3 * exposed[0]


def test_a_link_that_is_down_for_a_while_stalls_a_trial_which_counts(nodes: list[Machine], tmp_path: Path) -> None:
    run = start_training(nodes, tmp_path, log := tmp_path / "log")
    set_link(nodes[1], "down")
    time.sleep(DOWN_S)
    set_link(nodes[1], "up")
    assert run.wait(timeout=240) == 0, log.read_text()
    results = newest(tmp_path)
    trial = results.trials.set_index("devices").loc[2]
    assert trial["outcome"] == "ok" and "stalled" in trial["doubts"]
    (stall,) = results.stalls.to_dict("records")
    print("stalled for", stall["stalled_s"], "s on ranks", stall["waiting_ranks"])
    assert stall["stalled_s"] > 0.9 * DOWN_S and stall["devices"] == 2


def test_after_a_link_is_down_for_good_the_run_ends_with_typed_rows(nodes: list[Machine], tmp_path: Path) -> None:
    run = start_training(nodes, tmp_path, log := tmp_path / "log")
    set_link(nodes[1], "down")
    assert run.wait(timeout=300) == 1, log.read_text()
    results = newest(tmp_path)
    outcomes = results.trials.drop_duplicates("trial_id", keep="last").set_index("devices")["outcome"]
    print("outcome and reason:", outcomes[2], results.trials.set_index("devices")["reason"][2])
    assert outcomes[1] in ("ok", "lost") and outcomes[2] in ("lost", "timeout", "error")
    assert (results.folder.path / "report.html").is_file()
