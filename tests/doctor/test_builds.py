"""How often an examination builds the model, and what a copy of a model keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.doctor import gradients, subject
from harness.doctor.examine import examine
from harness.doctor.subject import FewBuilds
from tests.doctor.healthy import Healthy, Net
from tests.doctor.ranks import cell_for, subject_of

pytestmark = pytest.mark.usefixtures("no_timed_checks", "slow_builds")


@pytest.fixture
def slow_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "SLOW_S", 0.0)


class Counting(Healthy):
    def __init__(self) -> None:
        self.builds: list[int] = []

    def build_model(self) -> nn.Module:
        self.builds.append(1)
        self.net = Net()
        return self.net


@pytest.mark.parametrize(
    ("strategy", "devices", "room"), [("single", 1, True), ("dp", 2, False)], ids=["in memory", "in a file"]
)
def test_a_slow_model_is_built_twice(monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int, room: bool) -> None:
    monkeypatch.setattr(subject, "_fits_into_memory", lambda size: room)
    workload = Counting()
    found = examine(subject_of(workload, cell_for(strategy, devices), devices))
    assert {finding.check for finding in found.findings} <= {"threads"} and len(workload.builds) <= 2


@pytest.mark.parametrize("room", [True, False], ids=["in memory", "in a file"])
def test_a_copy_is_what_the_workload_keeps_of_its_model_too(monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    monkeypatch.setattr(subject, "_fits_into_memory", lambda size: room)
    few = FewBuilds(Counting())
    first = few.build_model()
    with torch.no_grad():
        next(first.parameters()).zero_()
    second: Any = few.build_model()
    assert few.inner.net is second is not first
    assert bool(second.first.weight.any()), "a copy of the model as it was built"
    assert (few.kept.model is not None, few.kept.file is not None) == (room, not room)
    third: Any = few.build_model()
    assert third is not second and torch.equal(third.first.weight, second.first.weight)
    assert len(few.inner.builds) == 1


@pytest.mark.parametrize("fails", ["no room on the disk", "no pickle", "not slow"])
def test_without_any_copy_each_model_is_built(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(subject, "_fits_into_memory", lambda size: False)
    few = FewBuilds(Counting())
    if fails == "not slow":
        monkeypatch.undo()
    elif fails == "no pickle":
        monkeypatch.setattr(Net, "__reduce_ex__", lambda self, protocol: 1 / 0)
    else:
        monkeypatch.setattr(subject, "ROOM", 1e18)
    assert few.build_model() is not few.build_model() and len(few.inner.builds) == 2
    assert few.kept.file is None


KEPT: dict[str, tuple[Callable[[Any], object], int]] = {
    "list": (lambda net: [net.first], 2),
    "mapping": (lambda net: {"body": {"first": net.first}}, 2),
    "parameter": (lambda net: net.first.weight, 2),
    "function": (lambda net: lambda batch: net(batch), 2),
    "method": (lambda net: net.first.forward, 2),
    "module around it": (nn.Sequential, 2),
    "nothing of it": (lambda net: nn.Linear(1, 1), 1),
}
"""What a workload keeps of its model, and how often two models are then built."""


class Keeping(Counting):
    """Keeps parts of its model, beside data and code that have none."""

    def __init__(self, keep: Callable[[Any], object]) -> None:
        super().__init__()
        self.keep, self.samples, self.code = keep, [(torch.zeros(1), {"a": 1})] * 3, [lambda: Net, torch.relu, nn]

    def build_model(self) -> nn.Module:
        super().build_model()
        self.kept = self.keep(self.net)
        return self.net


@pytest.mark.parametrize(("keep", "builds"), KEPT.values(), ids=KEPT)
def test_a_model_whose_parts_the_workload_keeps_is_built_each_time(keep: Callable[[Any], object], builds: int) -> None:
    few = FewBuilds(Keeping(keep))
    assert few.build_model() is not few.build_model() and len(few.inner.builds) == builds


class Hooked(nn.Module):
    """A model whose hook holds the model: a copy's would write into the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.features = nn.Linear(4, 1), list[Tensor]()
        self.layer.register_forward_hook(lambda module, given, found: self.features.append(found))

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.layer(x)
        return self.features[-1]


class KeepsFeatures(Healthy):
    def build_model(self) -> nn.Module:
        return Hooked()


def test_a_model_whose_hooks_hold_it_is_built_each_time() -> None:
    few = FewBuilds(KeepsFeatures())
    for model in (few.build_model(), few.build_model()):
        assert model(torch.ones(2, 4)).shape == (2, 1)


class Ramps(Healthy):
    """Keeps a state that its first loss() makes, as a teacher or a weight that grows step by step."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        total, weight = super().loss(model, batch)
        return self.calls * total, weight


def test_the_trainings_that_are_compared_share_no_state_of_the_workload() -> None:
    workload = Ramps()
    subject = subject_of(workload, cell_for("dp", 2), devices=2)
    seen = gradients.observe(subject)
    assert seen.products and not seen.unknown
    cross, one, own = (sum(values[i] for values in seen.products.values()) for i in range(3))
    assert cross == pytest.approx(one, rel=1e-3) and own == pytest.approx(one, rel=1e-3)
    assert not hasattr(workload, "calls")


class WithHead(Healthy):
    """A head whose loss is of train mode alone, beside dropout, as in Inception."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return scores + self.head(x) if self.training else scores


@pytest.mark.parametrize("unknown", [True, False])
def test_heads_of_train_mode_leave_gradients_unknown_if_each_parameter_needs_one(unknown: bool) -> None:
    """As under ddp; dp, which needs no group of processes, is given that trait."""
    traits = replace(BUILTIN_TRAITS["dp"], needs_every_gradient=unknown)
    seen = gradients.observe(subject_of(WithHead(), replace(cell_for("dp", 2), own_traits=traits), devices=2))
    assert ("as of heads for training: head.weight, head.bias" in seen.unknown) is unknown
    assert bool(seen.products) is not unknown
