"""The warm-up of a throughput trial, with steps as long as the test says; what else kept the machine busy."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config.sections import Throughput
from harness.measure import throughput
from harness.measure.throughput import _warm_up, is_steady
from harness.measure.window import Window
from harness.plan.rows import WindowKind
from harness.train.ranks import Ranks

ALONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
GPU = replace(ALONE, devices=(torch.device("cuda", 0),))
SETTINGS = Throughput(warmup_steps=20, warmup_rounds=4)


class Stepper:
    """Its first round takes ``first_s`` a step, the others ``step_s``."""

    def __init__(self, ranks: Ranks, step_s: float, first_s: float | None = None) -> None:
        self.ranks, self.step_s, self.first_s = ranks, step_s, first_s or step_s
        self.steps: list[int] = []

    def window(self, kind: WindowKind, steps: int) -> Window:
        step_s = self.step_s if self.steps else self.first_s
        self.steps.append(steps)
        return Window(kind, step_s * steps, [step_s] * steps, [0.0] * steps, {}, {}, 0.0, {"loss": []})


def warmed_up(stepper: Any, settings: Throughput = SETTINGS) -> tuple[list[int], bool]:
    """The steps of each round, and whether they became steady."""
    _, found = _warm_up(stepper, settings)
    return stepper.steps, found.steady


LONGER, SHORTER = (SETTINGS.model_copy(update={"warmup_seconds": seconds}) for seconds in (8.0, 0.0))


@pytest.mark.parametrize(
    ("ranks", "first_s", "settings", "steps"),
    [
        (ALONE, 0.005, SETTINGS, [20, 20]),
        (ALONE, 0.5, SETTINGS, [20, 20, 20]),
        (GPU, 0.005, SETTINGS, [20, 1000]),  # on a GPU the second lasts seconds
        # the first may be compilation: at its pace the least seconds are 20 steps, taken until the seconds are over
        (GPU, 1.0, SETTINGS, [20, 20, 980]),
        *((ranks, 0.005, LONGER, [20, 1600]) for ranks in (ALONE, GPU)),
        (GPU, 0.005, SHORTER, [20, 20]),
    ],
)
def test_rounds_go_on_until_two_are_alike(ranks: Ranks, first_s: float, settings: Throughput, steps: list[int]) -> None:
    assert warmed_up(Stepper(ranks, 0.005, first_s), settings) == (steps, True)


def test_a_warm_up_that_never_becomes_steady_ends_after_its_rounds() -> None:
    class Slowing(Stepper):
        def window(self, kind: WindowKind, steps: int) -> Window:
            self.step_s *= 1.5
            return super().window(kind, steps)

    steps, steady = warmed_up(Slowing(ALONE, 0.005))
    assert steps == [20] * 4 and not steady


FLAT = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


@pytest.mark.parametrize(
    ("rounds", "steady"),
    [
        ([], False),
        ([FLAT], False),
        ([FLAT, FLAT], True),
        ([[9.0, 1.0, 1.0, 1.0, 1.0, 1.0], FLAT], True),  # one dear first step moves no median
        ([[2.0, 1.9, 2.1, 2.0, 2.0, 2.0], FLAT], False),
        ([[1.0 - 0.04, 1.0, 1.0, 1.0, 1.0, 1.04], [1.04, 1.04, 1.04, 1.04, 1.04, 1.04]], True),
        ([FLAT, [1.3, 1.2, 1.1, 1.0, 0.9, 0.8]], False),  # a trend, though the medians nearly agree
        ([[0.9, 1.1, 0.95, 1.05, 0.92, 1.08], [1.0, 1.2, 1.03, 1.17, 1.1, 1.06]], True),  # alike within their noise
        ([[0.2, 3.0, 0.3, 2.9, 0.4, 2.8], [0.5, 9.0, 0.7, 8.0, 0.6, 8.5]], False),  # noise excuses 20 % at most
        ([[1.0], [1.0]], False),
    ],
)
def test_steady_state_is_distinguished_from_warm_up(rounds: list[list[float]], steady: bool) -> None:
    assert is_steady(rounds) is steady


def test_what_others_do_between_windows_is_no_load_of_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"watched_s": 0.0, "own_cpu_s": 0.0, "node_cpu_s": 0.0, "swapped_bytes": 0.0}

    def use(**more: float) -> None:
        now.update({name: now[name] + value for name, value in more.items()})

    monkeypatch.setattr(throughput, "read", lambda: dict(now))
    monitor = throughput.LoadMonitor(ALONE, shared=False)
    use(watched_s=1.0, own_cpu_s=0.9, node_cpu_s=1.0)
    monitor.leave_out(lambda: use(watched_s=5.0, node_cpu_s=5.0, swapped_bytes=7))
    use(watched_s=1.0, own_cpu_s=0.9, node_cpu_s=1.0)
    assert monitor.columns(1) == {"watched_s": 2.0, "own_cpu_s": 1.8, "node_cpu_s": 2.0, "swapped_bytes": 0.0}


def test_cpu_time_of_this_process_is_not_foreign() -> None:
    monitor = throughput.LoadMonitor(ALONE, shared=False)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    result = monitor.columns(1)
    assert min(result["own_cpu_s"], result["node_cpu_s"]) >= 0.15 and result["swapped_bytes"] >= 0
