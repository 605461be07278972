"""Links and collectives measured for real, over gloo: in this machine's memory, and over a link of a known rate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.hardware import bus_factor
from harness.measure.links import REPETITIONS, SMALLEST_BYTES
from tests.link_ranks import PER_NODE, SECONDS
from tests.worlds import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.alone]

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "send_receive"]
MBIT_PER_S = 200
BYTES_PER_S = MBIT_PER_S * 1e6 / 8
DEVICE = "link0"


def measured(folder: Path, seconds: float, variables: dict[str, str], prefixes: Sequence[Sequence[str]] = ()) -> Any:
    """What two ranks measure in this time; ``prefixes``: what each one's command begins with."""
    found = run_ranks("tests.link_ranks", 2, folder, prefixes=prefixes, variables={SECONDS: str(seconds), **variables})
    return json.loads(found.read_text())


def largest(rows: Sequence[dict[str, Any]], operation: str) -> dict[str, Any]:
    return max((row for row in rows if row["operation"] == operation), key=lambda row: row["size_bytes"])


def test_two_processes_measure_every_operation_within_the_time(tmp_path: Path) -> None:
    found = measured(tmp_path, 2.0, {PER_NODE: "2"})
    rows = found["rows"]
    assert list(dict.fromkeys(row["operation"] for row in rows)) == OPERATIONS
    assert found["notes"] == []  # that the time ends a sweep: test_links.py, by a clock of its own
    for operation in OPERATIONS:
        sizes = [row["size_bytes"] for row in rows if row["operation"] == operation]
        assert sizes == [SMALLEST_BYTES * 2**k for k in range(len(sizes))] and len(sizes) > 3
    assert all(0 < row["min_s"] <= row["time_s"] <= row["max_s"] for row in rows)
    assert {(row["backend"], row["tier"], row["repetitions"]) for row in rows} == {
        ("gloo", "inside a node", REPETITIONS)
    }
    assert {(row["source"], row["target"]) for row in rows if row["operation"] == "send_receive"} == {(0, 1)}
    assert found["advanced"] >= REPETITIONS * len(rows)  # or the watchdog would end a long measurement


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[list[str]]:
    """Two network namespaces joined by a link whose rate tc limits in both directions."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs ip and tc (iproute2)")
    names = [f"harness-{os.getpid()}-{end}" for end in "ab"]
    try:
        first, second = names
        commands = [f"ip netns add {first}", f"ip netns add {second}"]
        commands += [f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}"]
        for number, name in enumerate(names, start=1):
            inside = f"ip netns exec {name}"
            commands += [
                f"{inside} ip address add 10.97.0.{number}/24 dev {DEVICE}",
                f"{inside} ip link set lo up",
                f"{inside} ip link set {DEVICE} up",
                f"{inside} ip link set {DEVICE} gso_max_size 16384",
                f"{inside} tc qdisc replace dev {DEVICE} root tbf rate {MBIT_PER_S}mbit burst 32k limit 8mb",
            ]
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_the_largest_size_shows_the_rate_of_the_link(namespaces: list[str], tmp_path: Path) -> None:
    prefixes = [["ip", "netns", "exec", name] for name in namespaces]
    found = measured(tmp_path, 5.0, {PER_NODE: "1", "GLOO_SOCKET_IFNAME": DEVICE}, prefixes)
    assert {row["tier"] for row in found["rows"]} == {"between nodes"}
    for operation in ("send_receive", "all_reduce"):
        row = largest(found["rows"], operation)
        bus_bytes_per_s = bus_factor(operation, 2) * row["size_bytes"] / row["min_s"]  # which other load slows least
        assert bus_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.15), row
