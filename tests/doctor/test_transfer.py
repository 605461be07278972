"""Batches of types that a GPU would reject, found without one."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.doctor import devices
from harness.doctor.check import Case
from tests.doctor.findings import only
from tests.doctor.healthy import Healthy
from tests.doctor.ranks import cell_for, subject_of

ON_CPU = Case(cell_for("single", 1))
ON_GPU = Case(replace(ON_CPU.cell, device="cuda"))
Pair = namedtuple("Pair", "x y")


class Graph:
    """Tensors in attributes, and no method to(device)."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


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


def observed(make: Any, device: str = "cpu") -> devices.Moved:
    class Workload(Healthy):
        def collate(self, samples: list[Any]) -> Any:
            return make(torch.stack([x for x, _ in samples]))

    subject = subject_of(Workload())
    return devices.observe_transfer(replace(subject, ranks=replace(subject.ranks, devices=(torch.device(device),))))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, {"mask": x}],
        lambda x: Pair(x, x),
        lambda x: UserDict(x=x),
        lambda x: torch.nn.utils.rnn.pack_padded_sequence(x[..., None], [8] * len(x), batch_first=True),
        Record,
        lambda x: (x, "a name", None, 3),
    ],
    ids=["tensor", "containers", "namedtuple", "UserDict", "PackedSequence", "dataclass", "without tensors"],
)
def test_batches_that_can_be_moved(make: Any) -> None:
    assert observed(make) == devices.Moved()


@pytest.mark.parametrize(
    ("make", "text"),
    [(Graph, "WorkloadError: batch"), (MovesInPlace, "1 of 1 tensors are missing"), (ForgetsEdges, "batch.edges")],
)
def test_batches_that_cannot_be_moved(make: Any, text: str) -> None:
    seen = observed(make)
    assert text in seen.error + seen.left
    only(devices.judge_transfer([devices.Moved(), seen], ON_CPU), "warning", means="no effect on this machine")


def test_a_batch_that_cannot_be_moved_is_an_error_on_a_gpu() -> None:
    found = devices.judge_transfer([devices.Moved(left="y"), devices.Moved(error="x")], ON_GPU)
    assert only(found, "error").seen == "x"
    assert devices.judge_transfer([devices.Moved()] * 2, ON_GPU) == []


def test_a_batch_that_keeps_a_tensor_on_the_host_of_a_gpu_is_a_warning() -> None:
    made: list[Lengths] = []

    def make(x: Tensor) -> Lengths:
        made.append(Lengths(x))
        return made[0]

    seen = observed(make, "cuda:0")
    assert made[0].moved_to == ["cuda"] and not seen.error and "batch.lengths" in seen.left
    only(devices.judge_transfer([seen], ON_GPU), "warning", means="unless they belong on the host")
    only(devices.judge_transfer([observed(Lengths)], ON_CPU), "warning", seen="RuntimeError")
