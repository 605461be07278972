"""Peak memory: what a trial used, not what an earlier one did."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from harness.measure import memory
from harness.train.training import Training

CPU = [torch.device("cpu")]
MIB = 2**20


def test_resetting_the_peak_discards_the_old_one() -> None:
    if not memory.reset_peak(CPU):
        pytest.skip("this system does not let a process reset its peak")
    memory.reset_peak(CPU)
    before = memory.peak(CPU)["peak_memory_bytes"]
    block = mmap.mmap(-1, 64 * MIB)  # new pages: an allocator may have as much to give again
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    high = memory.peak(CPU)["peak_memory_bytes"]
    block.close()
    memory.reset_peak(CPU)
    after = memory.peak(CPU)["peak_memory_bytes"]
    assert before is not None and high is not None and after is not None
    assert high - before > 50 * MIB
    assert high - after > 50 * MIB


def test_a_gpus_peak_is_the_fullest_devices_and_a_cpu_has_no_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.peak(CPU)["peak_reserved_bytes"] is None
    forgotten: list[torch.device] = []
    allocated = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 30}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocated.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * allocated[device])
    devices = list(allocated)
    assert memory.reset_peak(devices) and forgotten == devices
    result = memory.peak(devices)
    assert (result["peak_memory_bytes"], result["peak_reserved_bytes"]) == (30, 60)
    assert (result["allocated_by_device"], result["reserved_by_device"]) == ("10, 30", "20, 60")
    assert result["resident_bytes"] != result["peak_memory_bytes"]


def test_adam_state_memory_by_hand() -> None:
    """A layer of 3 times 5 weights and 5 biases in fp32; Adam keeps two moments of each, and a step of each tensor."""
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters())
    training = cast(Training, SimpleNamespace(model=model, optimizer=optimizer))
    assert memory.of_state(training) == {"parameter_bytes": 80, "gradient_bytes": 0, "optimizer_bytes": 0}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert memory.of_state(training) == {"parameter_bytes": 80, "gradient_bytes": 80, "optimizer_bytes": 2 * 80 + 2 * 4}


def test_sharded_tensors_count_their_local_shard() -> None:
    class Shard:
        grad = None

        def to_local(self) -> torch.Tensor:
            return torch.ones(7, dtype=torch.bfloat16)

    model = SimpleNamespace(parameters=lambda: [Shard()], modules=list)
    optimizer = SimpleNamespace(state={})
    result = memory.of_state(cast(Training, SimpleNamespace(model=model, optimizer=optimizer)))
    assert result["parameter_bytes"] == 14
