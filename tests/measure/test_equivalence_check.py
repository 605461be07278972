"""The check that a strategy trains what one device trains, on one process; two are in the slow tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness.analysis.equivalence import REDUCED_DIFFERENCE
from harness.measure.equivalence import BUCKETS, Frozen, fold, measure_update, measure_updates
from harness.plan.cell import Cell
from harness.plan.trial import SkipTrial
from harness.train.ranks import Ranks

CPU = torch.device("cpu")
BASE = Cell("w", None, None, "single", "cpu", 1, 1, "strong", 8, 8, optimizer={"name": "SGD", "lr": 0.1})


class Small:
    """A net with batch statistics and dropout, which would make any split batch train otherwise."""

    unit = "samples"
    scale = 1.0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x) - y).square().sum() * self.scale, torch.tensor(float(len(x)))


def data(samples: int = 64) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def update_of(cell: Cell, workload: Any = None) -> np.ndarray:
    devices = tuple(CPU for _ in range(cell.devices))
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", devices)
    found = measure_update(cell, workload or Small(), data(), 0, ranks, lambda: None)
    assert found.finite
    return np.asarray(found.sketch)


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_the_same_training_twice_is_the_same() -> None:
    assert difference(update_of(BASE), update_of(BASE)) == 0.0


@pytest.mark.parametrize("devices", [2, 4])
def test_replicas_train_as_one_device_does(devices: int) -> None:
    dp = replace(BASE, strategy="dp", devices=devices, per_device_batch_size=8 // devices)
    assert difference(update_of(dp), update_of(BASE)) < 1e-4


def test_a_differently_scaled_loss_is_far_off() -> None:
    wrong = Small()
    wrong.scale = 2.0
    assert difference(update_of(BASE, wrong), update_of(BASE)) > 0.1


def test_the_frozen_model_has_statistics_but_learns_no_new_ones() -> None:
    batch = (data().tensors[0][:8], data().tensors[1][:8])
    model = Frozen(Small(), batch).build_model()
    norm, dropout = model[1], model[3]
    assert not norm.training
    assert not dropout.training
    assert not model[0].training  # what asks for self.training, as functional dropout does, rests too
    seen = model[0](batch[0]).mean(dim=0)
    assert torch.allclose(norm.running_mean, seen, atol=1e-6)


def test_too_little_data_is_a_skip_with_the_numbers() -> None:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    with pytest.raises(SkipTrial, match="8 exceeds the 4"):
        measure_update(BASE, Small(), data(4), 0, ranks, lambda: None)


def test_folding_is_linear_and_keeps_the_norm_within_a_few_percent() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(50_000, generator=generator), torch.randn(50_000, generator=generator)
    folded = [np.asarray(fold([tensor])) for tensor in (a, b, a - b)]
    assert len(folded[0]) == BUCKETS
    assert np.allclose(folded[0] - folded[1], folded[2], atol=1e-4)
    for tensor, numbers in zip((a, b, a - b), folded, strict=True):
        assert np.linalg.norm(numbers) == pytest.approx(float(tensor.norm()), rel=0.08)


def test_folding_depends_on_the_position_of_a_value() -> None:
    assert fold([torch.tensor([1.0, 0.0])]) != fold([torch.tensor([0.0, 1.0])])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_replicas_stay_within_the_bound_and_a_tenth_too_much_does_not(precision: str) -> None:
    single = replace(BASE, precision=precision)
    dp = replace(single, strategy="dp", devices=2, per_device_batch_size=4)
    reference = update_of(single)
    assert 0 < difference(update_of(single), update_of(BASE)) < 0.05  # it is another arithmetic
    assert difference(update_of(dp), reference) < REDUCED_DIFFERENCE
    for factor in (0.9, 1.1):
        wrong = Small()
        wrong.scale = factor
        assert difference(update_of(dp, wrong), reference) > REDUCED_DIFFERENCE


def test_the_check_takes_its_steps_in_fp32_and_in_16_bits_if_the_cell_does() -> None:
    def precisions(name: str) -> list[str]:
        ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
        cell = replace(BASE, precision=name)
        return list(measure_updates(cell, Small(), data(), 0, ranks, lambda: None))

    assert [precisions(name) for name in ("fp32", "bf16", "fp16")] == [["fp32"], ["fp32", "bf16"], ["fp32", "fp16"]]
