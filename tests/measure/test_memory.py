"""Peak memory: what a trial used, not what an earlier one did."""

from __future__ import annotations

import pytest
import torch

from harness.measure import memory

CPU = [torch.device("cpu")]
MIB = 2**20


def test_a_new_peak_forgets_the_old_one() -> None:
    if not memory.reset_peak(CPU):
        pytest.skip("this system does not let a process reset its peak")
    before = memory.peak(CPU)["peak_memory_bytes"]
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    high = memory.peak(CPU)["peak_memory_bytes"]
    del block
    memory.reset_peak(CPU)
    after = memory.peak(CPU)["peak_memory_bytes"]
    assert before is not None and high is not None and after is not None
    assert high - before > 50 * MIB
    assert high - after > 50 * MIB


def test_a_cpu_has_no_reserved_memory() -> None:
    assert memory.peak(CPU)["peak_reserved_bytes"] is None


def test_a_gpus_peak_is_the_fullest_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[torch.device] = []
    allocated = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 30}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocated.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * allocated[device])
    devices = list(allocated)
    assert memory.reset_peak(devices) and forgotten == devices
    told = memory.peak(devices)
    assert (told["peak_memory_bytes"], told["peak_reserved_bytes"]) == (30, 60)
    assert told["resident_bytes"] != told["peak_memory_bytes"]
