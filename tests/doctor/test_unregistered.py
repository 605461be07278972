"""Unregistered tensors of a model, and their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.doctor import devices, parameters
from harness.doctor.check import Case
from harness.doctor.facts import hidden_tensors, name_of
from tests.doctor.healthy import Healthy, Net
from tests.doctor.ranks import subject_of


class Hoarder(Net):
    """Has a tensor of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(16)
        self.blocks = [nn.Linear(16, 16), nn.BatchNorm1d(16)]
        self.tables = {"sin": torch.ones(4), "size": 4, "links": torch.eye(2).to_sparse()}
        self.known = nn.ModuleList([nn.Linear(1, 1)])
        self.register_buffer("kept", torch.ones(3))


def test_every_hidden_tensor_has_a_name_and_no_other() -> None:
    model = Hoarder()
    hidden = hidden_tensors(model)
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert {name for _, name in hidden} == {
        "mask (a plain attribute of Hoarder)",
        "tables['sin'] (in a plain dict)",
        "tables['links'] (in a plain dict)",
        *(f"blocks[0].{name} (in a plain list)" for name in ("weight", "bias")),
        *(f"blocks[1].{name} (in a plain list)" for name in norm),
    }
    assert name_of(model.blocks[0].weight.t(), hidden) == "blocks[0].weight (in a plain list)"  # type: ignore[operator]
    assert name_of(model.mask[2:], hidden) == "mask (a plain attribute of Hoarder)"
    for other in (model.kept, torch.ones(16), torch.ones(16, device="meta"), next(model.parameters())):
        assert name_of(other, hidden) is None


class InAList(Healthy):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(16), torch.ones(16)]

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x)) * self.scales[1].view(1, -1)
            return self.last(hidden)


def test_a_tensor_in_a_list_is_named_where_devices_meet() -> None:
    subject = subject_of(InAList())
    (finding,) = devices.judge([devices.observe(subject)], Case(subject.cell))
    assert finding.seen.startswith("scales[1] (in a plain list) on cpu, input on the model's device: operands of mul")


class OfTheWorkload(Healthy):
    def __init__(self) -> None:
        self.offset = nn.Parameter(torch.zeros(3))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return cross_entropy(model(x) + self.offset, y, reduction="sum"), torch.tensor(float(len(y)))


class OfEachStep(OfTheWorkload):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        self.offset = nn.Parameter(torch.zeros(3))
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("workload", "where"), [(OfTheWorkload, "outside the model"), (OfEachStep, "created in forward")]
)
def test_a_parameter_outside_the_model_is_told_from_one_that_each_step_creates(
    workload: type[Healthy], where: str
) -> None:
    subject = subject_of(workload())
    (finding,) = parameters.judge_loss_parameters([parameters.observe_loss_parameters(subject)], Case(subject.cell))
    assert finding.seen == f"parameters of the loss that are not in model.parameters(): 1 (shape (3,), {where})"
