"""A short training of a built-in workload on one device, in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from harness.config.sections import Convergence
from harness.measure.convergence import Epochs
from harness.measure.stepper import TrainingData
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.ranks import Ranks
from harness.train.training import Training

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


def learn(workload: str, model: str, optimizer: dict[str, Any], epochs: int, **options: Any) -> list[dict[str, float]]:
    """The rows of its epochs, at batch 16 of the workload's own data."""
    base = Cell(workload, None, model, "single", "cpu", 1, 1, "strong", 16, 16)
    cell = replace(base, optimizer=optimizer, workload_options=options)
    built = workloads.build(cell)
    training = Training(cell, built, 0, ONE)
    data = TrainingData(cell, 0, ONE, *built.datasets(), built)
    run = Epochs(training, data, Convergence(epochs=epochs), lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operators: two threads wait for each other more than they help
    try:
        run.run()
    finally:
        torch.set_num_threads(threads)
    assert run.diverged is None
    return run.rows


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
