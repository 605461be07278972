"""What else kept the machine busy."""

from __future__ import annotations

import time

from harness.measure import throughput
from harness.measure.throughput import Load


def test_usage_is_the_difference_of_two_readings() -> None:
    result = throughput.load_between(Load(1.0, 10.0, 100.0, 5), Load(3.0, 11.5, 103.0, 9))
    assert result == {"watched_s": 2.0, "own_cpu_s": 1.5, "node_cpu_s": 3.0, "swapped_bytes": 4}


def test_cpu_time_of_this_process_is_not_foreign() -> None:
    before = throughput.read()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    result = throughput.load_between(before, throughput.read())
    assert result["own_cpu_s"] >= 0.15
    assert result["node_cpu_s"] >= 0.15
    assert result["swapped_bytes"] >= 0
