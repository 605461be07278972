"""The peak memory of a real step on a CPU, by the allocation events of torch's profiler."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
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
from tests.worlds import rank_main

STEPS = 5
PARTICULAR_VARIABLE = "HARNESS_TEST_PARTICULAR"
"""The variable that names the particular cells to measure, joined by commas; without it all are."""
ADAMW = {"name": "AdamW", "lr": 0.001}
MOMENTUM = {"name": "SGD", "lr": 0.01, "momentum": 0.9}


def cell_of(workload: str, model: str, strategy: str, devices: int, batch: int, **more: object) -> Cell:
    """A cell as the planner makes it."""
    data = {"image_classification": "digits", "language_model": "synthetic"}[workload]
    made = Cell(workload, data, model, strategy, "cpu", devices, 1, "weak", batch, batch * devices)
    return replace(made, **{"optimizer": MOMENTUM if workload == "image_classification" else ADAMW, **more})  # type: ignore[arg-type]


def measured(cell: Cell, rank: int = 0) -> list[int]:
    """The peak of each of some steps: the largest sum of the events until then, and the batch, which was there before.

    The peaks of fsdp's steps differ: gloo's threads give up their tensors when they come to it.
    """
    workload = workloads.build(cell)
    data, _ = workload.datasets()
    load = largest_load(cell, workload, data)
    batch = load.micro_batches[0] if cell.micro_batches == 1 else load.micro_batches
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
    return [peak + load.bytes // cell.micro_batches for peak in peaks]


PARTICULAR: dict[str, dict[str, object]] = {
    "": {},
    "bf16": {"precision": "bf16"},
    "accumulation 2": {"training": {"accumulation": 2}},
    "gradient_as_bucket_view": {"strategy_options": {"gradient_as_bucket_view": True}},
    "not resharded": {"strategy_options": {"reshard_after_forward": False}},
}
ONLY_OF = {"gradient_as_bucket_view": "ddp", "not resharded": "fsdp"}
MODELS = (("image_classification", "resnet20", 128), ("language_model", "micro", 32))


def cells(devices: int, particular: Sequence[str] = tuple(PARTICULAR)) -> dict[str, Cell]:
    """The cells that are measured on this number of devices, by name."""
    return {
        f"{model}, {strategy}, {particular_name or 'fp32'}": cell_of(
            workload, model, strategy, devices, batch, **PARTICULAR[particular_name]
        )
        for workload, model, batch in MODELS
        for strategy in (("single",) if devices == 1 else ("ddp", "fsdp"))
        for particular_name in particular
        if ONLY_OF.get(particular_name, strategy) == strategy
    }


def estimated(cell: Cell) -> int:
    """The traced peak of the cell, without the allowance."""
    found = forecast(cell, examine(traced_cell(cell)), Inventory.assume(1, 0))
    assert found.peak is not None, found.reason
    return found.peak - found.allowance


def main(rank: int, world_size: int, out: Path) -> None:
    """Measure the cells of this world."""
    particular = os.environ.get(PARTICULAR_VARIABLE, "").split(",") if PARTICULAR_VARIABLE in os.environ else PARTICULAR
    peaks = {name: measured(cell, rank) for name, cell in cells(world_size, tuple(particular)).items()}
    if rank == 0:
        out.write_text(json.dumps(peaks))


if __name__ == "__main__":
    rank_main(main)
