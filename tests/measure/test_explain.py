"""A whole timed trial on one process: its windows, its phases, ddp's exchange taken away and put back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness.cell import Cell
from harness.config_sections import Throughput
from harness.errors import SkipTrial, WorkloadError
from harness.measure.communication import measure_communication
from harness.measure.profiled import measure_collectives
from harness.measure.stepper import Stepper
from harness.measure.throughput import measure_throughput
from harness.ranks import Ranks
from harness.training import Training

CPU = torch.device("cpu")
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "weak", 8, 8, optimizer={"name": "Adam", "lr": 0.01})
FAST = Throughput(blocks=1, warmup_steps=3, windows=2, window_steps=4, window_seconds=0.0)


class Net:
    unit = "samples"
    lie = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(x) + self.lie))


def stepper_for(cell: Cell, workload: Any = None, samples: int = 64) -> Stepper:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", tuple(CPU for _ in range(cell.devices)))
    training = Training(cell, workload or Net(), 0, ranks)
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    return Stepper(training, data, cell, 0, ranks, collate=None, advance=lambda: None)


def test_warm_up_goes_in_rounds_to_its_limit_and_windows_follow() -> None:
    speed = measure_throughput(stepper_for(CELL), FAST)
    kinds = [stretch.kind for stretch in speed.stretches]
    rounds = kinds.count("warmup")
    assert 2 <= rounds <= FAST.warmup_rounds
    assert kinds == ["warmup"] * rounds + ["timed"] * 2
    assert speed.steady or rounds == FAST.warmup_rounds
    assert speed.finite
    assert [stretch.weight for stretch in speed.stretches[-2:]] == [32.0, 32.0]
    assert speed.load["watched_s"] > 0


def test_the_phases_of_a_window_add_up_to_its_steps() -> None:
    window = stepper_for(CELL).window("timed", 5).window
    assert sum(window.phases.values()) == pytest.approx(sum(window.step_s), rel=1e-9)
    assert sum(window.step_s) <= window.duration_s
    assert window.phases["forward"] > 0
    assert window.phases["backward"] > 0


def test_a_weight_that_is_not_the_batchs_length_is_refused() -> None:
    workload = Net()
    workload.lie = 1
    with pytest.raises(WorkloadError, match="weight of 18 for 16 samples"):
        stepper_for(CELL, workload).window("timed", 2)


def test_a_batch_above_the_data_set_is_skipped_with_the_numbers() -> None:
    with pytest.raises(SkipTrial, match="global batch 8 exceeds the 7"):
        stepper_for(CELL, samples=7)


@pytest.mark.usefixtures("no_group")
def test_after_the_communication_windows_everything_is_as_before() -> None:
    stepper = stepper_for(replace(CELL, strategy="ddp"))
    stepper.window("warmup", 3)
    before = stepper.training.snapshot()
    stretches, told = measure_communication(stepper, 20)
    assert [stretch.kind for stretch in stretches] == ["alone", "together"] * 2
    assert {stretch.window.steps for stretch in stretches} == {5}
    assert set(told) <= {"ddp_communication_s", "ddp_exposed_s"}
    after = stepper.training.snapshot()
    for name, value in before["model"].items():
        assert torch.equal(value, after["model"][name]), name
    for index, state in before["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["optimizer"]["state"][index][name]), name


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
def test_the_emulated_replicas_tell_of_their_collectives() -> None:
    stepper = stepper_for(replace(CELL, strategy="dp", devices=2, global_batch_size=16))
    stepper.window("warmup", 2)
    told = measure_collectives("dp", stepper)
    assert set(told) == {"dp_replicate_s", "dp_scatter_s", "dp_gather_s", "dp_reduce_s"}
    assert all(seconds > 0 for seconds in told.values())
