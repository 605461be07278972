"""Layers that wait: their sizes, deadlines, factors and gradients; no test waits for real."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from harness.train.workloads import emulated_compute
from harness.train.workloads.emulated_compute import EmulatedCompute, PassNumbers
from tests.train.workloads.learning import count


class Clock:
    """Time that passes while something sleeps, and by ``late`` more each time."""

    def __init__(self) -> None:
        self.now, self.late, self.slept = 100.0, 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(emulated_compute, "time", clock := Clock())
    return clock


def test_sizes_grow_to_the_last_layer() -> None:
    sizes = EmulatedCompute(mebibytes=1, layers=4, skew=8).sizes()
    assert sizes[3] == pytest.approx(8 * sizes[0], rel=0.01) and sizes == sorted(sizes)
    assert sum(sizes) == pytest.approx(2**18, abs=4)
    assert EmulatedCompute(mebibytes=1e-6, layers=3).sizes() == [1, 1, 1]


def test_a_step_takes_a_third_forward_and_two_thirds_backward(clock: Clock) -> None:
    model = EmulatedCompute(mebibytes=0.01, layers=4, step_ms=90, sample_ms=15).build_model()
    output = model(torch.zeros(2, 1))
    assert clock.now == pytest.approx(100.04) and clock.slept == pytest.approx([0.01] * 4)
    output.sum().backward()
    assert clock.now == pytest.approx(100.12) and clock.slept[4:] == pytest.approx([0.02] * 4)


def test_deadlines_are_absolute(clock: Clock) -> None:
    """What a wait is late is taken from the next one."""
    clock.late = 0.004
    EmulatedCompute(mebibytes=0.01, layers=4, step_ms=120).build_model()(torch.zeros(2, 1))
    assert clock.now == pytest.approx(100.044)
    assert clock.slept == pytest.approx([0.010, 0.006, 0.006, 0.006])
    clock.late, clock.slept = 1.0, []
    EmulatedCompute(mebibytes=0.01, layers=2, step_ms=60).build_model()(torch.zeros(2, 1))
    assert clock.slept == pytest.approx([0.01]), "a late layer does not wait"


def test_evaluation_waits_for_the_forward_pass_alone(clock: Clock) -> None:
    with torch.no_grad():
        EmulatedCompute(mebibytes=0.01, step_ms=30).build_model()(torch.zeros(2, 1))
    assert clock.now == pytest.approx(100.01)


def durations(
    rank: int, monkeypatch: pytest.MonkeyPatch, clock: Clock, passes: int = 400, **options: Any
) -> list[float]:
    monkeypatch.setattr(emulated_compute, "is_initialized", lambda: True)
    monkeypatch.setattr(emulated_compute, "get_rank", lambda: rank)
    model = EmulatedCompute(mebibytes=0.01, layers=1, step_ms=3000, **options).build_model()
    found = []
    for _ in range(passes):
        before = clock.now
        model(torch.zeros(1, 1))
        found.append(clock.now - before)
    return found


def test_factors_are_lognormal_by_rank_and_by_pass(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = torch.tensor(durations(1, monkeypatch, clock, step_spread=0.1)).log()
    assert float(spread.mean()) == pytest.approx(0, abs=0.02) and float(spread.std()) == pytest.approx(0.1, abs=0.015)
    of_ranks = [durations(rank, monkeypatch, clock, 2, rank_spread=0.1) for rank in range(200)]
    assert all(first == pytest.approx(second) for first, second in of_ranks)
    logs = torch.tensor([math.log(first) for first, _ in of_ranks])
    assert float(logs.std()) == pytest.approx(0.1, abs=0.02) and float(logs.mean()) == pytest.approx(0, abs=0.03)


def test_factors_repeat_with_the_seed_and_differ_between_ranks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (durations(1, monkeypatch, clock, 5, step_spread=0.1) for _ in range(2))
    assert first == pytest.approx(again)
    assert first != pytest.approx(durations(2, monkeypatch, clock, 5, step_spread=0.1))
    assert first != pytest.approx(durations(1, monkeypatch, clock, 5, step_spread=0.1, seed=1))


def test_the_gradient_is_that_of_the_sum_of_the_parameters(clock: Clock) -> None:
    """While a layer's parameters are equal, as they stay, the first of them stands for their sum."""
    workload = EmulatedCompute(mebibytes=0.0001, layers=3)
    model, values = workload.build_model(), torch.tensor([[1.0], [2.0]])
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.fill_(0.1 * (place + 1))
    total, weight = workload.loss(model, values)
    total.backward()
    scale = 1 / math.sqrt(count(model))
    leaves = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    expected = (values + scale * sum(leaf.sum() for leaf in leaves)).square().sum()
    expected.backward()
    torch.testing.assert_close(total, expected)
    assert weight == 2
    for parameter, leaf in zip(model.parameters(), leaves, strict=True):
        torch.testing.assert_close(parameter.grad, leaf.grad)


@pytest.mark.parametrize("correlation", [0.8, 0.0])
def test_neighbouring_passes_are_correlated_as_asked(correlation: float) -> None:
    passes = PassNumbers("1", correlation)
    numbers = np.array([passes.draw() for _ in range(20_000)])
    assert np.std(numbers) == pytest.approx(1.0, abs=0.05)
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(correlation, abs=0.02)
