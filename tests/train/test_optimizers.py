"""Optimizers and schedules by name, and what a wrong name is answered with."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import WorkloadError
from harness.plan.planner import make_plan
from harness.run.prepare import check_optimizers
from harness.train.optimizers import WarmUp, by_step, fast_forward, make_optimizer, make_schedule, scale_rate
from tests.conftest import Make, laptop
from tests.equivalence import Regression

MODEL = nn.Linear(1, 1)
SGD = {"name": "SGD", "lr": 0.1}


def test_optimizers_and_schedules_get_their_options() -> None:
    optimizer = make_optimizer(MODEL, {"name": "AdamW", "lr": 0.5, "weight_decay": 0.25})
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    schedule = make_schedule(optimizer, {"name": "StepLR", "step_size": 1, "gamma": 0.5})
    assert schedule is not None
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)
    assert make_schedule(optimizer, {}) is None


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("optimizer", {"name": "SGDD"}, ".name: got 'SGDD'; did you mean 'SGD'?"),
        ("optimizer", {"name": "Optimizer"}, ".name: got 'Optimizer'"),
        ("optimizer", {"name": "SGD", "lrr": 1}, ".lrr: SGD has no such option; did you mean 'lr'?"),
        ("optimizer", {"name": "SGD", "lr": -1.0}, ": SGD does not take {name: 'SGD', lr: -1.0} (ValueError: Invalid"),
        ("optimizer", {"name": "SGD", "lr": "fast"}, ": SGD does not take {name: 'SGD', lr: 'fast'}"),
        ("optimizer", {"name": 3}, ".name: got 3"),
        ("schedule", {"name": "CosineLR"}, ".name: got 'CosineLR'; did you mean"),
        ("schedule", {"name": "StepLR"}, ": StepLR does not take {name: 'StepLR'} (TypeError"),
        ("schedule", {"T_max": 3}, ".name: got None"),
        ("schedule", {"name": "StepLR", "step": 1}, ".step: StepLR has no such option; did you mean 'step_size'?"),
        ("schedule", {"name": "StepLR", "interval": "batch"}, ".interval: got 'batch'; allowed: epoch, step"),
    ],
)
def test_a_wrong_option_is_named(section: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        if section == "optimizer":
            make_optimizer(MODEL, options)
        make_schedule(make_optimizer(MODEL, SGD), options)
    assert str(caught.value).startswith(f"{section}{message}")


def test_a_rate_is_scaled_whether_it_is_given_or_the_optimizers_own() -> None:
    assert scale_rate(make_optimizer(MODEL, SGD), 4.0) == pytest.approx(0.4)
    assert scale_rate(make_optimizer(MODEL, {"name": "Adam"}), 2.0) == pytest.approx(0.002)


def test_warm_up_rises_evenly_from_the_base_rate_to_the_scaled_one() -> None:
    optimizer = make_optimizer(MODEL, SGD)
    scale_rate(optimizer, 4.0)
    seen = []
    with WarmUp(optimizer, 4.0, steps=3).rates_from(0) as set_rate:
        for _ in range(5):
            set_rate()
            seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    unscaled = [WarmUp(make_optimizer(MODEL, SGD), factor, steps=10).part(0) for factor in (1.0, 0.5)]
    assert unscaled == [1.0, 1.0], "a rate that is not scaled up needs none"


def test_warm_up_goes_on_where_an_epoch_begins_and_beside_a_schedule() -> None:
    optimizer = make_optimizer(MODEL, {"name": "SGD", "lr": 0.2})  # as a schedule left it
    with WarmUp(optimizer, 4.0, steps=6).rates_from(3) as set_rate:
        set_rate()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 2.5 / 4)
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"name": "MultiStepLR", "milestones": [2, 3], "gamma": 0.1},
        {"name": "CosineAnnealingLR", "T_max": 5},
        {"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 10},
        {"name": "ExponentialLR", "gamma": 0.9},
        {"name": "CosineAnnealingLR", "T_max": 5, "interval": "step", "warmup_steps": 4},
    ],
)
def test_a_schedule_goes_on_from_where_it_was(options: dict[str, Any]) -> None:
    def stepped(steps: int) -> Any:
        optimizer = make_optimizer(nn.Linear(1, 1), {"name": "SGD", "lr": 0.1, "momentum": 0.9})
        schedule = make_schedule(optimizer, options)
        assert schedule is not None
        optimizer.step()
        for _ in range(steps):
            schedule.step()
        return optimizer, schedule

    before, _ = stepped(3)
    whole, _ = stepped(6)
    optimizer, schedule = stepped(0)
    optimizer.load_state_dict(before.state_dict())
    fast_forward(schedule, 3)
    assert optimizer.param_groups[0]["lr"] == before.param_groups[0]["lr"]
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == whole.param_groups[0]["lr"]


def test_a_schedule_advances_at_each_step_beside_a_warm_up() -> None:
    """Rates of a schedule that halves: 0.4, 0.2, 0.1, 0.05; the warm-up over two steps takes 1/4 and 5/8 of them."""
    optimizer = make_optimizer(MODEL, {"name": "SGD", "lr": 0.4})
    schedule = make_schedule(optimizer, {"name": "ExponentialLR", "gamma": 0.5, "interval": "step"})
    warm_up = WarmUp(optimizer, 4.0, steps=2)
    seen: list[float] = []
    for first in (0, 2):
        with warm_up.rates_from(first, schedule) as set_rate:
            for _ in range(2):
                set_rate()
                seen.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
    assert seen == pytest.approx([0.4 / 4, 0.2 * 5 / 8, 0.1, 0.05])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_schedule_advances_once_an_epoch_unless_the_file_says_otherwise() -> None:
    assert [by_step(options) for options in ({}, {"interval": "epoch"}, {"interval": "step"})] == [False, False, True]


def test_a_warm_up_in_steps_rises_to_the_rate_from_which_the_schedule_starts() -> None:
    optimizer = make_optimizer(MODEL, {"name": "SGD", "lr": 0.8})
    options = {"name": "ExponentialLR", "gamma": 0.5, "interval": "step", "warmup_steps": 4}
    schedule = make_schedule(optimizer, options)
    assert schedule is not None
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.4, 0.2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warmup_steps": 4}, "needs schedule.interval: step; got epoch"),
        ({"warmup_steps": -1, "interval": "step"}, "got -1; allowed: a number of steps"),
        ({"warmup_steps": 1.5, "interval": "step"}, "got 1.5; allowed: a number of steps"),
    ],
)
def test_a_warm_up_in_steps_needs_a_number_and_a_schedule_by_step(options: dict[str, Any], text: str) -> None:
    optimizer = make_optimizer(MODEL, SGD)
    with pytest.raises(WorkloadError, match=text):
        make_schedule(optimizer, {"name": "StepLR", "step_size": 1, **options})


class MakesItsOwn(Regression):
    def optimizer(self, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=options["peak"])

    def schedule(self, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        return None


@pytest.mark.parametrize("own", [True, False])
def test_options_are_the_workloads_own_if_it_makes_the_optimizer(make_experiment: Make, own: bool) -> None:
    workload = f"{__name__}:MakesItsOwn" if own else "tests.equivalence:Regression"
    sections = {"optimizer": {"name": "Mine", "peak": 0.1}, "schedule": {"name": "Mine", "half": 3}}
    grid = {"strategy": "single", "devices": 1, "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, workload=workload, **sections), laptop())
    with nullcontext() if own else pytest.raises(WorkloadError, match=r"optimizer\.name: got 'Mine'"):
        check_optimizers(plan)
