"""Step times by laws that know nothing of a step's parts."""

from __future__ import annotations

import pytest

from harness.analysis.prediction.step_model import by_laws


@pytest.mark.parametrize(("strong", "ideal"), [(False, 8.0), (True, 1.0)])
def test_the_ideal_step(strong: bool, ideal: float) -> None:
    assert by_laws({1: 8.0}, 8, strong=strong) == {"ideal": ideal}


def test_there_is_none_without_one_device() -> None:
    assert by_laws({2: 8.0, 4: 9.0}, 8, strong=False) == {}


@pytest.mark.parametrize("strong", [False, True])
def test_amdahls_law_is_met_by_what_follows_it(strong: bool) -> None:
    def step(n: int) -> float:
        return (8.0 / n if strong else 8.0) * (1 + 0.1 * (n - 1))

    assert by_laws({n: step(n) for n in (1, 2, 4)}, 16, strong=strong)["amdahl"] == pytest.approx(step(16))


@pytest.mark.parametrize("strong", [False, True])
def test_the_ring_line_is_met_by_what_follows_it(strong: bool) -> None:
    def step(n: int) -> float:
        return (8.0 / n if strong else 8.0) + 8 * (0.5 * (n - 1) / n + 0.01 * (n - 1))

    assert by_laws({n: step(n) for n in (1, 2, 4)}, 16, strong=strong)["ring_line"] == pytest.approx(step(16))


def test_no_cost_is_below_zero() -> None:
    found = by_laws({1: 8.0, 2: 7.0, 4: 6.0}, 8, strong=False)
    assert found == {"ideal": 8.0, "amdahl": 8.0, "ring_line": 8.0}
