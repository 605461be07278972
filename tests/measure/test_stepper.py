"""The stream of batches behind a training's steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.measure.stepper import Stepper
from harness.plan.cell import Cell
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.equivalence import Regression

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
BATCH, PARTS = 6, 3
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "weak", BATCH, BATCH, optimizer={"name": "SGD", "lr": 0.1})


class Counted(Regression):
    """Notes the samples of each forward pass."""

    def __init__(self) -> None:
        super().__init__("samples")
        self.sizes: list[int] = []

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


@pytest.mark.parametrize("data", [None, "synthetic_device"])
def test_with_accumulation_every_step_takes_its_own_micro_batches(data: str | None) -> None:
    cell = replace(CELL, data=data, training={"accumulation": PARTS})
    workload = Counted()
    stepper = Stepper(
        Training(cell, workload, 0, ONE), workload.datasets()[0], cell, 0, ONE, collate=None, advance=lambda: None
    )
    source, taken = stepper.fetch, []
    stepper.fetch = (taken.append(batch) or batch for batch in source)  # type: ignore[func-returns-value]
    stepper.step()
    batch: Any = stepper.one_batch()
    assert len(taken) == 2 * PARTS, "the next step begins with its first micro-batch"
    assert len(batch[0]) == BATCH // PARTS
    window = stepper.window("timed", 2)
    assert workload.sizes == [BATCH // PARTS] * 3 * PARTS
    assert window.weight == 2 * BATCH and window.window.steps == 2
