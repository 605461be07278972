"""What nn.DataParallel's replicas lose to each other, on an emulation whose seconds a clock of its own counts."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harness.measure.explain import ROUNDS, measure_replicas
from harness.plan.cell import Cell
from tests.measure.test_explain import CELL, Net, stepper_for

TWO = replace(CELL, strategy="dp", devices=2, global_batch_size=16)


class Counting(Net):
    """Advances a clock by a second a forward pass, and by ten in a thread of its own."""

    def __init__(self) -> None:
        self.seconds, self.sizes, self.lock = 0.0, [], threading.Lock()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self.lock:
            self.seconds += 1.0 if threading.current_thread() is threading.main_thread() else 10.0
            self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


@pytest.mark.parametrize(("cell", "times"), [(TWO, 1), (replace(TWO, training={"accumulation": 2}), 2)])
def test_threads_and_what_replicas_lose_to_each_other_are_separate_seconds_a_step(cell: Cell, times: int) -> None:
    workload = Counting()
    stepper = stepper_for(cell, workload)
    workload.sizes.clear()
    facts = measure_replicas(stepper, 20, clock=lambda: workload.seconds)
    assert facts == {"exchange_s": {"threads": times * (10.0 - 1.0), "side by side": times * (2 * 10.0 - 10.0)}}
    assert set(workload.sizes) == {8 // times}, "each replica has its chunk of the batch"
    assert len(workload.sizes) == ROUNDS * (5 + 1) * (1 + 1 + 2)


def test_the_training_itself_is_left_as_it_was() -> None:
    stepper = stepper_for(TWO)
    stepper.window("warmup", 2)
    before = stepper.training.snapshot()
    measure_replicas(stepper, 20)
    for name, value in stepper.training.snapshot()["model"].items():
        assert torch.equal(value, before["model"][name]), name
