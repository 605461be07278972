"""Optimizers and schedules by name, and what a wrong name is answered with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import WorkloadError
from harness.optimizers import make_optimizer, make_schedule

MODEL = nn.Linear(1, 1)
SGD = {"name": "SGD", "lr": 0.1}


def test_an_optimizer_gets_its_options() -> None:
    optimizer = make_optimizer(MODEL, {"name": "AdamW", "lr": 0.5, "weight_decay": 0.25})
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_a_schedule_gets_its_options() -> None:
    optimizer = make_optimizer(MODEL, SGD)
    schedule = make_schedule(optimizer, {"name": "StepLR", "step_size": 1, "gamma": 0.5})
    assert schedule is not None
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_no_schedule_is_none() -> None:
    assert make_schedule(make_optimizer(MODEL, SGD), {}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "SGDD"}, "optimizer.name: got 'SGDD'; did you mean 'SGD'?"),
        ({"name": "Optimizer"}, "optimizer.name: got 'Optimizer'"),
        ({"name": "SGD", "lrr": 1}, "optimizer.lrr: SGD has no such option; did you mean 'lr'?"),
        (
            {"name": "SGD", "lr": -1.0},
            "optimizer: SGD does not take {name: 'SGD', lr: -1.0} (ValueError: Invalid",
        ),
        ({"name": "SGD", "lr": "fast"}, "optimizer: SGD does not take {name: 'SGD', lr: 'fast'}"),
        ({"name": 3}, "optimizer.name: got 3"),
    ],
)
def test_wrong_optimizers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        make_optimizer(MODEL, options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "CosineLR"}, "schedule.name: got 'CosineLR'; did you mean"),
        ({"name": "StepLR"}, "schedule: StepLR does not take {name: 'StepLR'} (TypeError"),
        ({"T_max": 3}, "schedule.name: got None"),
        ({"name": "StepLR", "step": 1}, "schedule.step: StepLR has no such option; did you mean 'step_size'?"),
    ],
)
def test_wrong_schedules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        make_schedule(make_optimizer(MODEL, SGD), options)
    assert str(caught.value).startswith(message)
