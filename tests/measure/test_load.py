"""What else kept the machine busy."""

from __future__ import annotations

import time

from harness.measure import load
from harness.measure.load import Load


def test_between_two_readings_lies_what_was_used() -> None:
    told = load.load_between(Load(1.0, 10.0, 100.0, 5), Load(3.0, 11.5, 103.0, 9))
    assert told == {"watched_s": 2.0, "own_cpu_s": 1.5, "node_cpu_s": 3.0, "swapped_bytes": 4}


def test_work_of_this_process_is_its_own() -> None:
    before = load.read()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    told = load.load_between(before, load.read())
    assert told["own_cpu_s"] >= 0.15
    assert told["node_cpu_s"] >= 0.15
    assert told["swapped_bytes"] >= 0
