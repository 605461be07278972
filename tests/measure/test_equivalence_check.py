"""The check that a strategy trains what one device trains, on one process; two are in the slow tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from harness.analysis.equivalence import REDUCED_DIFFERENCE, along, relative
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.measure import sketches
from harness.measure.sketches import BUCKETS, RELATIVE_STEP, Frozen, fold, measure_by_precision, measure_sketches
from harness.measure.stepper import TrainingData
from harness.plan.cell import Cell
from harness.plan.comparison import MAX_DIFFERENCE
from harness.plan.trial import SkipTrial
from harness.train.ranks import Ranks
from harness.train.workloads.image_classification import ImageClassification
from tests.doctor.lookalikes import OwnNorm

CPU = torch.device("cpu")
BASE = Cell("w", None, None, "single", "cpu", 1, 1, "strong", 8, 8, optimizer={"name": "SGD", "lr": 0.1})


class Small:
    """A net with batch statistics and dropout, which would make any split batch train otherwise."""

    unit = "samples"
    scale = 1.0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x) - y).square().sum() * self.scale, torch.tensor(float(len(x)))


class Graph:
    """A batch with a method ``to``, as PyG's."""

    moved: ClassVar[list[torch.device]] = []

    def to(self, device: torch.device) -> Graph:
        self.moved.append(device)
        return self


def test_a_frozen_model_has_statistics_of_a_batch_on_the_host_as_it_is() -> None:
    """Of a batch on a GPU its statistics would have no model there."""
    batch = data()[:8]
    model: Any = Frozen(Small(), batch).build_model()
    # what asks for self.training, as functional dropout does, rests too
    assert not any(layer.training for layer in model)
    assert torch.allclose(model[1].running_mean, model[0](batch[0]).mean(dim=0), atol=1e-6)
    Frozen(Small(), {"x": torch.ones(2, 4), "more": [Graph()]})
    assert Graph.moved == [CPU]


def data(samples: int = 64) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def sketches_of(cell: Cell, workload: Any = None, dataset: Any = None) -> dict[str, np.ndarray]:
    """The sketches of one process's check by quantity; all are finite."""
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,) * cell.devices)
    samples = dataset or data()
    found = measure_sketches(TrainingData(cell, 0, ranks, samples, samples, workload or Small()), lambda: None)
    assert found.finite
    return {name: np.asarray(sketch) for name, sketch in found.quantities.items()}


def differences(own: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> dict[str, float]:
    assert list(own) == list(alone) == ["first_update", "scaled_update", "gradient"]
    return {name: relative(own[name], alone[name]) for name in own}


def replicated(cell: Cell, devices: int = 2) -> Cell:
    return replace(cell, strategy="dp", devices=devices, per_device_batch_size=8 // devices)


def test_replicas_train_as_one_device_does_which_trains_twice_alike() -> None:
    alone = sketches_of(BASE)
    assert set(differences(sketches_of(BASE), alone).values()) == {0.0}
    for devices in (2, 4):
        assert max(differences(sketches_of(replicated(BASE, devices)), alone).values()) < 1e-4


class WithOwnNorm(Small):
    how = "in place"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), OwnNorm(8, self.how), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("how", ["in place", "replaced", "constant"])
def test_running_statistics_of_a_class_of_the_users_are_frozen_too(how: str) -> None:
    workload = WithOwnNorm()
    workload.how = how
    batch = data()[:8]
    frozen = Frozen(workload, batch, train=True)
    model: Any = frozen.build_model()
    assert frozen.evaluates == (how != "constant") != model.training  # constant buffers are no statistics
    if frozen.evaluates:
        assert torch.allclose(model[1].mean, model[0](batch[0]).mean(dim=0), atol=0.01)
    alone = sketches_of(BASE, workload)
    assert max(differences(sketches_of(replicated(BASE), workload), alone).values()) < 1e-4


@pytest.mark.parametrize("factor", [0.9, 1.1, 2.0])
def test_a_differently_scaled_loss_is_seen_in_gradient_and_first_update(factor: float) -> None:
    found = differences(sketches_of(BASE, Small(factor)), sketches_of(BASE))
    assert [found[name] for name in ("gradient", "first_update")] == pytest.approx([abs(factor - 1)] * 2, rel=1e-3)


@pytest.mark.parametrize(
    "ignoring", [{"optimizer": {"name": "Adam", "lr": 0.001}}, {"training": {"clip_grad_norm": 1e-3}}]
)
def test_a_wrong_scale_is_seen_in_the_gradient_if_no_update_shows_it(ignoring: dict[str, Any]) -> None:
    cell = replace(BASE, **ignoring)
    found = differences(sketches_of(cell, Small(2.0)), sketches_of(cell))
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
    monkeypatch.setattr(sketches, "STEPS", 1)
    model = Frozen(Small(), data()[:8]).build_model
    torch.manual_seed(0)
    whole = torch.cat([parameter.detach().flatten() for parameter in model().parameters()]).norm()
    for rate in (1e-6, 0.1, 1e3):
        cell = replace(BASE, optimizer={"name": "SGD", "lr": rate})
        step = np.linalg.norm(sketches_of(cell)["scaled_update"])
        assert step == pytest.approx(RELATIVE_STEP * float(whole), rel=0.1)


@pytest.mark.slow
def test_a_deep_network_has_a_verdict_at_a_rate_at_which_it_diverges() -> None:
    model = "resnet34"
    workload = ImageClassification(model=model, data="digits", image_size=16)
    images = workload.datasets()[0]
    cell = replace(BASE, optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9})
    alone = sketches_of(cell, workload, images)
    assert max(differences(sketches_of(replicated(cell), workload, images), alone).values()) < MAX_DIFFERENCE

    class Wrong(ImageClassification):
        def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight = super().loss(model, batch)
            return 1.1 * total, weight

    wrong = Wrong(model=model, data="digits", image_size=16)
    found = differences(sketches_of(cell, wrong, images), alone)
    assert found["gradient"] > 0.09 and found["first_update"] > 0.09


def test_a_strategy_of_the_users_own_is_judged_by_its_updates() -> None:
    """It may reduce the gradients in its optimizer."""
    assert [*sketches_of(replace(BASE, own_traits=BUILTIN_TRAITS["single"]))] == ["first_update", "scaled_update"]


class Collates(Small):
    """Collates with a function that may draw random numbers."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * (1.0 + 0.1 * self.draw()), y


OWN, REPEATS = np.random.default_rng(1), random.Random(1)


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda: float(np.random.beta(1.0, 1.0)), "^collate draws random numbers$"),
        (lambda: float(torch.rand(())), "^collate draws random numbers$"),
        (random.random, "^collate draws random numbers$"),
        (lambda: float(OWN.uniform()), "a batch changes when it is read again: the data set or collate draws"),
        (REPEATS.random, "a batch changes when it is read again"),
    ],
)
def test_a_collate_that_draws_is_a_skip_with_the_reason(draw: Callable[[], float], reason: str) -> None:
    with pytest.raises(SkipTrial, match=reason):
        sketches_of(replicated(BASE), Collates(draw))


class InTrainModeAlone(Small):
    """Has losses in train mode alone. ``layer``: what acts by mode in it, or not."""

    def __init__(self, layer: nn.Module | None = None, draw: Callable[[], float] = lambda: 1.0) -> None:
        self.layer, self.draw = layer, draw

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), self.layer or nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        losses = {"loss": (model(x) - y).square().sum() * self.draw()} if model.training else {}
        return losses["loss"], torch.tensor(float(len(x)))


def test_losses_of_train_mode_alone_are_compared_if_nothing_acts_by_mode_and_else_skipped() -> None:
    workload, wrong = InTrainModeAlone(), InTrainModeAlone(draw=lambda: 1.1)
    alone = sketches_of(BASE, workload)
    assert max(differences(sketches_of(replicated(BASE), workload), alone).values()) < 1e-4
    assert differences(sketches_of(replicated(BASE), wrong), alone)["gradient"] > 0.09
    at_random = InTrainModeAlone(draw=lambda: float(torch.rand(())))  # samples what its loss is of, as detection does
    for in_eval_mode in (InTrainModeAlone(nn.Dropout(0.1)), InTrainModeAlone(nn.BatchNorm1d(8)), at_random):
        with pytest.raises(SkipTrial, match=r"^loss\(\) fails in eval mode: KeyError: 'loss'$"):
            sketches_of(BASE, in_eval_mode)
    same = InTrainModeAlone(nn.Dropout(0.0))  # which acts alike in both modes
    assert max(differences(sketches_of(replicated(BASE), same), sketches_of(BASE, same)).values()) < 1e-4


class ZeroInEvalMode(InTrainModeAlone):
    """As torchvision's detectors, whose losses are an empty dictionary in eval mode."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().loss(model, batch) if model.training else (torch.tensor(0.0), torch.tensor(float(len(batch[0]))))


def test_a_loss_without_a_gradient_in_eval_mode_is_not_compared() -> None:
    with pytest.raises(SkipTrial, match=r"^loss\(\) has no gradient in eval mode$"):
        sketches_of(BASE, ZeroInEvalMode(nn.Dropout(0.1)))


class FunctionalDropout(Small):
    """Acts by mode without a layer that does: compared in eval mode after an attempt in train mode."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return super().loss(model, (nn.functional.dropout(x, 0.5, training=model.training), y))


class InnerDropout(FunctionalDropout):
    """Dropout as an attribute of attention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x[:, None, :].expand(-1, 3, -1)
            return self.attention(rows, rows, rows)[0].sum(dim=(1, 2))[:, None]

    def build_model(self) -> nn.Module:
        return self.Net()


@pytest.mark.parametrize("workload", [FunctionalDropout(), InnerDropout(), Collates(lambda: 0.5)])
def test_dropout_that_is_no_layer_is_off_and_a_collate_that_draws_nothing_is_compared(workload: Any) -> None:
    found = differences(sketches_of(replicated(BASE), workload), sketches_of(BASE, workload))
    assert max(found.values()) < 1e-4


class SparseTable(Small):
    """An embedding with sparse gradients: a table, or bags of its rows."""

    def __init__(self, kind: Callable[..., nn.Module], width: int, scale: float = 1.0) -> None:
        self.kind, self.width, self.scale = kind, width, scale

    def build_model(self) -> nn.Module:
        return nn.Sequential(self.kind(20, 4, sparse=True), nn.Flatten(), nn.Linear(self.width, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return super().loss(model, ((5 * x.abs()).long().clamp(max=19), y))


@pytest.mark.parametrize(("kind", "width"), [(nn.Embedding, 16), (nn.EmbeddingBag, 4)])
def test_sparse_gradients_are_compared(kind: Callable[..., nn.Module], width: int) -> None:
    workload, wrong = SparseTable(kind, width), SparseTable(kind, width, 1.1)
    alone = sketches_of(BASE, workload)
    assert max(differences(sketches_of(BASE, workload), alone).values()) == 0.0
    assert differences(sketches_of(BASE, wrong), alone)["gradient"] == pytest.approx(0.1, rel=1e-2)


def test_too_little_data_is_a_skip_with_the_numbers() -> None:
    with pytest.raises(SkipTrial, match="8 exceeds the 4"):
        sketches_of(BASE, dataset=data(4))


def test_folding_is_linear_keeps_the_norm_within_a_few_percent_and_depends_on_the_position() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(50_000, generator=generator), torch.randn(50_000, generator=generator)
    folded = [np.asarray(vector) for vector in fold([[a], [b], [a - b]])]
    assert len(folded[0]) == BUCKETS
    assert np.allclose(folded[0] - folded[1], folded[2], atol=1e-4)
    for tensor, numbers in zip((a, b, a - b), folded, strict=True):
        assert np.linalg.norm(numbers) == pytest.approx(float(tensor.norm()), rel=0.08)
    first, second = fold([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])]])
    assert first != second


@pytest.mark.parametrize("optimizer", [{"name": "SGD", "lr": 0.1}, {"name": "Adam", "lr": 0.001}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_replicas_are_in_the_bound_a_tenth_more_is_not(precision: str, optimizer: dict[str, Any]) -> None:
    single = replace(BASE, precision=precision, optimizer=optimizer)
    reference = sketches_of(single)
    assert 0 < relative(sketches_of(single)["gradient"], sketches_of(BASE)["gradient"]) < 0.05  # another arithmetic
    own = sketches_of(replicated(single))
    assert relative(own["gradient"], reference["gradient"]) < REDUCED_DIFFERENCE
    assert max(along(own[name], reference[name]) for name in ("first_update", "scaled_update")) < REDUCED_DIFFERENCE
    for wrong in (Small(0.9), Small(1.1)):
        assert relative(sketches_of(replicated(single), wrong)["gradient"], reference["gradient"]) > REDUCED_DIFFERENCE


def test_the_check_takes_its_steps_in_fp32_and_in_16_bits_if_the_cell_does() -> None:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    for name, precisions in (("fp32", ["fp32"]), ("bf16", ["fp32", "bf16"]), ("fp16", ["fp32", "fp16"])):
        checked = TrainingData(replace(BASE, precision=name), 0, ranks, data(), data(), Small())
        found = measure_by_precision(checked, lambda: None)
        assert [*found] == precisions


class Low(Small):
    """A net whose own parameters have 16 bits."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1).to(torch.bfloat16)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x.to(torch.bfloat16)).float() - y).square().sum(), torch.tensor(float(len(x)))


def test_sketches_of_parameters_of_16_bits_have_the_name_of_their_precision() -> None:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    for workload, name in ((Small(), "fp32"), (Low(), "bf16")):
        found = measure_by_precision(TrainingData(BASE, 0, ranks, data(), data(), workload), lambda: None)
        assert [*found] == [name]
