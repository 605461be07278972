"""What a GPU would reject, found without one: batches of some types, tensors of a model that are not registered."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.doctor import parameters, placement
from harness.doctor.facts import hidden_tensors, name_of
from harness.doctor.subject import Case, first_found
from harness.plan.checks import Finding
from tests.doctor.conftest import only
from tests.doctor.healthy import Graph, Healthy, Net
from tests.doctor.ranks import cell_for, subject_of

ON_CPU = Case(cell_for("single", 1))
ON_GPU = Case(replace(ON_CPU.cell, device="cuda"))
Pair = namedtuple("Pair", "x y")


class MovesInPlace(Graph):
    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


class ForgetsEdges(Graph):
    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.edges = torch.zeros(2)

    def to(self, device: torch.device) -> Any:
        self.x = self.x.to(device)
        return self


@dataclass
class Record:
    x: Tensor


class Lengths:
    """A batch that reads a value in ``to``, and keeps lengths on the host, where pack_padded_sequence needs them."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.lengths = x, torch.full((len(x),), 8)
        self.moved_to: list[str] = []

    def to(self, device: torch.device) -> Any:
        self.moved_to.append(device.type)
        torch.zeros((), device="meta" if device.type == "meta" else "cpu").item()
        return self


def observed(make: Any, device: str = "cpu") -> list[Finding]:
    class Workload(Healthy):
        def collate(self, samples: list[Any]) -> Any:
            return make(torch.stack([x for x, _ in samples]))

    subject = subject_of(Workload())
    return placement.observe_transfer(replace(subject, ranks=replace(subject.ranks, devices=(torch.device(device),))))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, {"mask": x}],
        *(lambda x: Pair(x, x), lambda x: UserDict(x=x)),
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x[..., None], [8] * len(x), batch_first=True),
        Record,
        lambda x: (x, "a name", None, 3),
    ],
    ids=["tensor", "containers", "namedtuple", "UserDict", "PackedSequence", "dataclass", "without tensors"],
)
def test_batches_that_can_be_moved(make: Any) -> None:
    assert observed(make) == []


@pytest.mark.parametrize(
    ("make", "text"),
    [(Graph, "WorkloadError: batch"), (MovesInPlace, "1 of 1 tensors are missing"), (ForgetsEdges, "batch.edges")],
)
def test_batches_that_cannot_be_moved(make: Any, text: str) -> None:
    finding = only(first_found([[], observed(make)], ON_CPU), "warning", means="no effect on this machine")
    assert text in finding.seen


def test_on_a_gpu_a_batch_that_cannot_be_moved_is_an_error_and_one_that_keeps_a_tensor_on_the_host_a_warning() -> None:
    assert first_found([[], []], ON_GPU) == ()
    left, raised = (Finding("batch transfer", severity, "", "", "") for severity in ("warning", "error"))
    assert first_found([[], [left], [raised]], ON_GPU) == [raised] and first_found([[], [left]], ON_GPU) == [left]
    failed = only(observed(Graph, "cuda:0"), "error", seen="WorkloadError: batch")
    assert failed.means == "error of every step on a GPU"
    made: list[Lengths] = []

    def make(x: Tensor) -> Lengths:
        made.append(Lengths(x))
        return made[0]

    seen = observed(make, "cuda:0")
    assert made[0].moved_to == ["cuda"]
    only(seen, "warning", seen="batch.lengths", means="unless they belong on the host")
    only(observed(Lengths), "warning", seen="RuntimeError")


class Hoarder(Net):
    """Has a tensor of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(16)
        self.blocks = [nn.Linear(16, 16), nn.BatchNorm1d(16)]
        self.tables = {"sin": torch.ones(4), "size": 4, "links": torch.eye(2).to_sparse()}
        self.scales = [torch.ones(16), torch.ones(16)]
        self.known = nn.ModuleList([nn.Linear(1, 1)])
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * self.scales[1].view(1, -1))


def test_every_hidden_tensor_has_a_name_and_no_other() -> None:
    model = Hoarder()
    hidden = hidden_tensors(model)
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert {name for _, name in hidden} == {
        "mask (a plain attribute of Hoarder)",
        "tables['sin'] (in a plain dict)",
        "tables['links'] (in a plain dict)",
        *(f"{name} (in a plain list)" for name in ("scales[0]", "scales[1]", "blocks[0].weight", "blocks[0].bias")),
        *(f"blocks[1].{name} (in a plain list)" for name in norm),
    }
    assert name_of(model.blocks[0].weight.t(), hidden) == "blocks[0].weight (in a plain list)"  # type: ignore[operator]
    assert name_of(model.mask[2:], hidden) == "mask (a plain attribute of Hoarder)"
    for other in (model.kept, torch.ones(16), torch.ones(16, device="meta"), next(model.parameters())):
        assert name_of(other, hidden) is None


def test_a_tensor_in_a_list_is_named_where_devices_meet() -> None:
    workload = Healthy()
    workload.Net = Hoarder
    subject = subject_of(workload)
    (finding,) = placement.observe(subject)
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


class Perceptual(Healthy):
    """Compares features of a network that is kept in eval mode, and asks a discriminator that trains on its own."""

    def __init__(self, *, trains: bool = True) -> None:
        self.features, self.judge = nn.Linear(3, 4).eval(), nn.Linear(4, 1)
        self.own = torch.optim.SGD(self.judge.parameters() if trains else [torch.zeros(1)], lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return self.judge(self.features(model(x))).square().sum(), torch.tensor(float(len(y)))


def test_modules_that_a_workload_keeps_beside_its_model_are_no_error() -> None:
    (note,) = parameters.observe_loss_parameters(subject_of(Perceptual()))
    assert note.severity == "note" and "beside its model: 4 (" in note.seen
    error, note = parameters.observe_loss_parameters(subject_of(Perceptual(trains=False)))
    assert (error.severity, note.severity) == ("error", "note") and "model.parameters(): 2 (" in error.seen


@pytest.mark.parametrize(
    ("workload", "where"), [(OfTheWorkload, "outside the model"), (OfEachStep, "created in forward")]
)
def test_a_parameter_outside_the_model_is_told_from_one_of_each_step(workload: type[Healthy], where: str) -> None:
    subject = subject_of(workload())
    (finding,) = parameters.observe_loss_parameters(subject)
    assert finding.seen == f"parameters of the loss that are not in model.parameters(): 1 (shape (3,), {where})"
