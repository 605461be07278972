"""Which cells are trained to convergence, and the reason that the plan gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.config.experiment import Experiment
from harness.errors import ExperimentError
from harness.plan.planner import make_plan
from harness.run.plan_text import plan_lines
from tests.conftest import laptop

Make = Callable[..., Experiment]
GRID = {"strategy": ["single", "ddp"], "devices": [1, 2, 64], "per_device_batch_size": [8, 16]}


def experiment(make: Make, **settings: object) -> Experiment:
    exclude = [{"strategy": "single", "devices": [2, 64]}]
    return make(GRID, exclude=exclude, throughput=None, convergence={"epochs": 1, "seeds": 0, **settings})


def test_named_device_counts_are_trained_and_those_that_are_absent_here_skipped(make_experiment: Make) -> None:
    plan = make_plan(experiment(make_experiment, devices=[1, 64]), laptop())
    trained = {(t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size) for t in plan.trials}
    assert trained == {("single", 1, 8), ("ddp", 1, 8)}
    assert {(skip.trial.cell.strategy, skip.trial.cell.devices) for skip in plan.skips} == {("ddp", 64)}
    (line,) = (line for line in plan_lines(plan) if line.startswith("Convergence: "))
    assert line.endswith(
        "(on the devices of convergence.devices, 1, 64, at the first batch size of the grid; and the base of each)."
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "each strategy on the most devices that it can have here, at the first batch size of the grid"),
        (
            {"global_batch_size": 32},
            "each strategy on the most devices that it can have here, at convergence.",
        ),
        (
            {"only": {"devices": 2, "strategy": "ddp"}},
            "cells that match convergence.only (strategy), on the",
        ),
        (
            {"only": {"per_device_batch_size": 16}},
            "convergence.only (per_device_batch_size), each strategy",
        ),
    ],
)
def test_the_plan_says_why(settings: dict[str, object], reason: str, make_experiment: Make) -> None:
    plan = make_plan(experiment(make_experiment, **settings), laptop())
    assert reason in "".join(plan_lines(plan))


def test_device_counts_that_the_grid_lacks_or_that_are_named_twice_are_bad_input(make_experiment: Make) -> None:
    with pytest.raises(ExperimentError, match=r"convergence.devices.*\n?.*got 3, 4; allowed: 1, 2, 64"):
        make_plan(experiment(make_experiment, devices=[1, 3, 4]), laptop())
    with pytest.raises(ExperimentError, match="devices: got it here and in only; give one of both"):
        experiment(make_experiment, devices=2, only={"devices": 2})
