"""With and without activation checkpointing a model trains alike; only what is kept for backward differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.measure.explain import _arithmetic
from harness.measure.stepper import Stepper, TrainingData
from harness.plan.cell import Cell
from harness.plan.trial import SkipTrial
from harness.train.activation_checkpointing import Checkpointed, checkpointed
from harness.train.loader import Share
from harness.train.ranks import Ranks
from harness.train.training import Training

CPU = torch.device("cpu")
NONE = Cell("w", None, None, "single", "cpu", 1, 1, "weak", 8, 8, optimizer={"name": "SGD", "lr": 0.1})
FULL = replace(NONE, activation_checkpointing="full")


class Blocks:
    """Three blocks with batch statistics and, unless 0, dropout."""

    unit = "samples"

    def __init__(self, dropout: float = 0.5) -> None:
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Dropout(self.dropout), nn.Tanh())
            for momentum in (0.1, None, 0.5)
        ]
        return nn.Sequential(*blocks, nn.Linear(4, 1))

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [child for child in model.children() if isinstance(child, nn.Sequential)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(x)))


def stepper_of(cell: Cell, workload: Any) -> Stepper:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,) * cell.devices)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    training = Training(cell, workload, 0, ranks)
    return Stepper(training, TrainingData(cell, 0, ranks, data, data, workload), lambda: None)


def state_after(cell: Cell, workload: Any) -> dict[str, Tensor]:
    """The parameters and statistics after three steps."""
    stepper = stepper_of(cell, workload)
    for _ in range(3):
        stepper.step()
    wrapped = sum(isinstance(module, Checkpointed) for module in stepper.training.model.modules())
    assert wrapped == (3 if cell.activation_checkpointing == "full" else 0)
    return stepper.training.unwrapped.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_dropout_and_statistics_are_those_of_a_model_that_keeps_its_activations(precision: str) -> None:
    kept = state_after(replace(NONE, precision=precision), Blocks())
    recomputed = state_after(replace(FULL, precision=precision), Blocks())
    assert list(kept) == list(recomputed)
    assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []


def test_a_synchronised_norm_counts_each_batch_once() -> None:
    class Synchronised(Blocks):
        def build_model(self) -> nn.Module:
            return nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model())

    states = [state_after(cell, Synchronised()) for cell in (NONE, FULL)]
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile reads it; pytest turns it into an error
def test_where_torch_compile_breaks_the_graph_statistics_are_updated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cumulative average breaks it; with another backend, since inductor needs a C++ compiler."""
    model_compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model, **_: model_compile(model, backend="aot_eager"))
    states = [state_after(cell, Blocks(dropout=0.0)) for cell in (NONE, replace(FULL, compile=True))]
    counted = {name: int(value) for name, value in states[1].items() if name.endswith("num_batches_tracked")}
    assert set(counted.values()) == {3} and len(counted) == 3
    assert [name for name in states[0] if not torch.allclose(states[0][name], states[1][name], atol=1e-6)] == []


def test_replicas_of_dataparallel_compute_their_own_units_again() -> None:
    two = replace(NONE, strategy="dp", devices=2, per_device_batch_size=4)
    kept = state_after(two, Blocks(dropout=0.0))
    recomputed = state_after(replace(two, activation_checkpointing="full"), Blocks(dropout=0.0))
    assert [name for name in kept if not torch.allclose(kept[name], recomputed[name])] == []


class Factor(nn.Module):
    """Dropout, times one weight: the gradient of a sum is the sum over the weight if both passes drop the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.ones(len(x), 1000)) * self.weight


class OneFactor:
    unit = "samples"

    def build_model(self) -> nn.Module:
        return nn.Sequential(Factor())

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]).sum(), torch.tensor(float(len(batch[0])))


def test_replicas_that_share_a_generator_drop_the_same_in_both_passes() -> None:
    cell = replace(FULL, strategy="dp", devices=2, per_device_batch_size=4, optimizer={"name": "SGD", "lr": 0.0})
    for _ in range(5):  # of replicas in threads some draw from each other's state
        stepper = stepper_of(cell, OneFactor())
        share = Share(((0, 0),) * 8, 8, 8)
        taken = stepper.training.step(stepper.one_batch(), share)
        (parameter,) = stepper.training.model.parameters()
        assert parameter.grad is not None
        assert float(parameter.grad * parameter.detach()) == pytest.approx(float(taken.loss / taken.weight), rel=1e-6)


def test_less_is_kept_for_backward() -> None:
    def kept_bytes(model: nn.Module) -> int:
        kept = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.zeros(1000, 4)).sum()
        return sum(kept.values())

    model = Blocks().build_model()
    whole = kept_bytes(model)
    checkpointed(model, Blocks().shard_units(model))
    assert kept_bytes(model) < whole / 2


def test_a_second_forward_pass_is_no_model_flop() -> None:
    counted = [_arithmetic(stepper_of(cell, Blocks()), {}) for cell in (NONE, FULL)]
    assert counted[0]["flops_per_unit"] == counted[1]["flops_per_unit"] == 2 * 3 * (3 * 16 + 4) - 2 * 16


def test_a_model_without_shard_units_is_skipped_with_a_sentence() -> None:
    class NoUnits(Blocks):
        def build_model(self) -> nn.Module:
            return nn.Linear(4, 1)

        def shard_units(self, model: nn.Module) -> list[nn.Module]:
            return []

    with pytest.raises(SkipTrial, match="applies to shard units, and the model has none") as caught:
        stepper_of(FULL, NoUnits())
    assert caught.value.reason.code == "no_shard_units"
