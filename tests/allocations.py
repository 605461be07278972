"""The peak memory of a real step on a CPU, by the allocation events of torch's profiler."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.measure.memory_trace import examine, largest_load
from harness.plan.cell import Cell
from harness.plan.inventory import Inventory
from harness.plan.memory_forecast import forecast, traced_cell
from harness.train import workloads
from harness.train.ranks import Ranks
from harness.train.training import Training

STEPS = 5
ADAMW = {"name": "AdamW", "lr": 0.001}
MOMENTUM = {"name": "SGD", "lr": 0.01, "momentum": 0.9}
MODELS = (("image_classification", "digits", "resnet20", 128), ("language_model", "synthetic", "micro", 32))


def cells(devices: int) -> dict[str, Cell]:
    """The cells that are measured on this number of devices, by name."""
    made = [
        Cell(workload, data, model, strategy, "cpu", devices, 1, "weak", batch, batch * devices)
        for workload, data, model, batch in MODELS
        for strategy in (("single",) if devices == 1 else ("ddp", "fsdp"))
    ]
    optimizers = {"image_classification": MOMENTUM, "language_model": ADAMW}
    found = {f"{cell.model}, {cell.strategy}": replace(cell, optimizer=optimizers[cell.workload]) for cell in made}
    again = {f"{name}, checkpointed": cell for name, cell in found.items() if cell.workload == "language_model"}
    return found | {name: replace(cell, activation_checkpointing="full") for name, cell in again.items()}


def measured(cell: Cell, rank: int = 0) -> list[int]:
    """The peak of each of some steps: the largest sum of the events until then, and the batch, which was there before.

    The peaks of fsdp's steps differ: gloo's threads give up their tensors when they come to it.
    """
    workload = workloads.build(cell)
    data, _ = workload.datasets()
    load = largest_load(cell, workload, data)
    (batch,) = load.micro_batches
    ranks = Ranks(rank, cell.devices, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training = Training(cell, workload, 0, ranks)
        training.step(batch, load.share)
        for number in range(STEPS):
            with record_function(f"measured step {number}"):
                training.step(batch, load.share)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.end_ns()) for e in events if e.name().startswith("measured step"))
    allocations = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    sums = list(accumulate(size for _, size in allocations))
    peaks = [max(s for (at, _), s in zip(allocations, sums, strict=True) if begin <= at <= end) for begin, end in steps]
    return [peak + load.bytes for peak in peaks]


def estimated(cell: Cell) -> int:
    """The traced peak of the cell, without the allowance."""
    found = forecast(cell, examine(traced_cell(cell)), Inventory.assume(1, 0))
    assert found.peak is not None, found.reason
    return found.peak - found.allowance


def main(rank: int, world_size: int, out: Path) -> None:
    """Measure the cells of this world."""
    peaks = {name: measured(cell, rank) for name, cell in cells(world_size).items()}
    if rank == 0:
        out.write_text(json.dumps(peaks))
