"""The check that a strategy trains what one device trains, on one process; two are in the slow tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness.analysis.equivalence import MAX_DIFFERENCE, REDUCED_DIFFERENCE, along, relative
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.measure import equivalence
from harness.measure.equivalence import BUCKETS, RELATIVE_STEP, Frozen, fold, measure_by_precision, measure_sketches
from harness.plan.cell import Cell
from harness.plan.trial import SkipTrial
from harness.train.ranks import Ranks
from harness.train.workloads.image_classification import ImageClassification

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


def sketches_of(cell: Cell, workload: Any = None, dataset: Any = None) -> dict[str, np.ndarray]:
    """The sketches of one process's check by quantity; all are finite."""
    devices = tuple(CPU for _ in range(cell.devices))
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", devices)
    found = measure_sketches(cell, workload or Small(), dataset or data(), 0, ranks, lambda: None)
    assert found.finite
    return {name: np.asarray(sketch) for name, sketch in found.quantities.items()}


def differences(own: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> dict[str, float]:
    assert list(own) == list(alone) == ["first_update", "scaled_update", "gradient"]
    return {name: relative(own[name], alone[name]) for name in own}


def replicated(cell: Cell, devices: int = 2) -> Cell:
    return replace(cell, strategy="dp", devices=devices, per_device_batch_size=8 // devices)


def test_the_same_training_twice_is_the_same() -> None:
    assert set(differences(sketches_of(BASE), sketches_of(BASE)).values()) == {0.0}


@pytest.mark.parametrize("devices", [2, 4])
def test_replicas_train_as_one_device_does(devices: int) -> None:
    assert max(differences(sketches_of(replicated(BASE, devices)), sketches_of(BASE)).values()) < 1e-4


@pytest.mark.parametrize("factor", [0.9, 1.1, 2.0])
def test_a_differently_scaled_loss_is_seen_in_gradient_and_first_update(factor: float) -> None:
    wrong = Small()
    wrong.scale = factor
    found = differences(sketches_of(BASE, wrong), sketches_of(BASE))
    assert found["gradient"] == pytest.approx(abs(factor - 1), rel=1e-3)
    assert found["first_update"] == pytest.approx(abs(factor - 1), rel=1e-3)


def test_a_wrong_scale_is_seen_in_the_gradient_under_an_optimizer_that_ignores_it() -> None:
    adam = replace(BASE, optimizer={"name": "Adam", "lr": 0.001})
    wrong = Small()
    wrong.scale = 2.0
    found = differences(sketches_of(adam, wrong), sketches_of(adam))
    assert found["gradient"] > 0.9 and found["first_update"] < MAX_DIFFERENCE


def test_the_gradient_is_compared_before_it_is_clipped() -> None:
    clipped = replace(BASE, training={"clip_grad_norm": 1e-3})
    wrong = Small()
    wrong.scale = 2.0
    found = differences(sketches_of(clipped, wrong), sketches_of(clipped))
    assert found["gradient"] == pytest.approx(1.0, rel=1e-3) and found["first_update"] < MAX_DIFFERENCE


def test_state_of_the_optimizer_that_is_lost_is_seen_in_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum counts from the second step on: a strategy that shards it wrongly has the right first update."""
    momentum = replace(BASE, optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9})
    right = sketches_of(momentum)
    step = torch.optim.SGD.step

    def forgetful(self: torch.optim.SGD, closure: Any = None) -> Any:
        self.state.clear()
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", forgetful)
    found = differences(sketches_of(momentum), right)
    assert found["first_update"] < MAX_DIFFERENCE < 0.1 < found["scaled_update"]


def test_the_first_scaled_step_has_a_thousandth_of_the_norm_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "STEPS", 1)
    model = Frozen(Small(), data()[:8]).build_model
    torch.manual_seed(0)
    whole = torch.cat([parameter.detach().flatten() for parameter in model().parameters()]).norm()
    for rate in (1e-6, 0.1, 1e3):
        cell = replace(BASE, optimizer={"name": "SGD", "lr": rate})
        step = np.linalg.norm(sketches_of(cell)["scaled_update"])
        assert step == pytest.approx(RELATIVE_STEP * float(whole), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet34", "resnet18", "resnet50"])
def test_deep_networks_have_a_verdict_at_a_rate_at_which_they_diverge(model: str) -> None:
    workload = ImageClassification(model=model, data="digits", image_size=16)
    images = workload.datasets()[0]
    cell = replace(BASE, optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9})
    alone = sketches_of(cell, workload, images)
    assert max(differences(sketches_of(replicated(cell), workload, images), alone).values()) < MAX_DIFFERENCE
    loss = workload.loss

    class Wrong(ImageClassification):
        def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight = loss(model, batch)
            return 1.1 * total, weight

    wrong = Wrong(model=model, data="digits", image_size=16)
    found = differences(sketches_of(cell, wrong, images), alone)
    assert found["gradient"] > 0.09 and found["first_update"] > 0.09


def test_a_strategy_of_the_users_own_is_judged_by_its_updates() -> None:
    """It may reduce the gradients in its optimizer."""
    own = replace(BASE, own_traits=BUILTIN_TRAITS["single"])
    assert list(sketches_of(own)) == ["first_update", "scaled_update"]


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
        measure_sketches(BASE, Small(), data(4), 0, ranks, lambda: None)


def test_folding_is_linear_and_keeps_the_norm_within_a_few_percent() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(50_000, generator=generator), torch.randn(50_000, generator=generator)
    folded = [np.asarray(vector) for vector in fold([[a], [b], [a - b]])]
    assert len(folded[0]) == BUCKETS
    assert np.allclose(folded[0] - folded[1], folded[2], atol=1e-4)
    for tensor, numbers in zip((a, b, a - b), folded, strict=True):
        assert np.linalg.norm(numbers) == pytest.approx(float(tensor.norm()), rel=0.08)


def test_folding_depends_on_the_position_of_a_value() -> None:
    first, second = fold([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])]])
    assert first != second


@pytest.mark.parametrize("optimizer", [{"name": "SGD", "lr": 0.1}, {"name": "Adam", "lr": 0.001}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_replicas_stay_within_the_bound_and_a_tenth_too_much_does_not(
    precision: str, optimizer: dict[str, Any]
) -> None:
    single = replace(BASE, precision=precision, optimizer=optimizer)
    reference = sketches_of(single)
    assert 0 < relative(sketches_of(single)["gradient"], sketches_of(BASE)["gradient"]) < 0.05  # another arithmetic
    own = sketches_of(replicated(single))
    assert relative(own["gradient"], reference["gradient"]) < REDUCED_DIFFERENCE
    assert max(along(own[name], reference[name]) for name in ("first_update", "scaled_update")) < REDUCED_DIFFERENCE
    for factor in (0.9, 1.1):
        wrong = Small()
        wrong.scale = factor
        assert relative(sketches_of(replicated(single), wrong)["gradient"], reference["gradient"]) > REDUCED_DIFFERENCE


def test_the_check_takes_its_steps_in_fp32_and_in_16_bits_if_the_cell_does() -> None:
    def precisions(name: str) -> list[str]:
        ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
        cell = replace(BASE, precision=name)
        return list(measure_by_precision(cell, Small(), data(), 0, ranks, lambda: None))

    assert [precisions(name) for name in ("fp32", "bf16", "fp16")] == [["fp32"], ["fp32", "bf16"], ["fp32", "fp16"]]
