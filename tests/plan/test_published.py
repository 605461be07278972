"""Which cell a published figure is of: exactly one, on every machine; and that no id depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.errors import ExperimentError
from harness.plan.planner import make_plan
from tests.conftest import gpu_cluster, laptop

Make = Callable[..., Experiment]
GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16], "optimizer.lr": [0.1, 0.01]}
ONE = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8, "optimizer.lr": 0.1}


def entry(metric: str = "step_s", **cell: Any) -> dict[str, Any]:
    return {"metric": metric, "value": 1, "cell": cell, "source": "A. Author", "hardware": "2 X100"}


def test_a_figure_of_one_cell_changes_no_id(make_experiment: Make) -> None:
    plain, given = make_experiment(GRID), make_experiment(GRID, published=[entry(**ONE)])
    ids = [[trial.id for trial in make_plan(each, laptop()).trials] for each in (plain, given)]
    assert ids[0] == ids[1]
    make_plan(given, gpu_cluster())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({**ONE, "devices": 4}, "which 0 of the 16 cells match; allowed: axes of the grid"),
        (
            {"strategy": "ddp", "devices": 2},
            "which 4 of the 16 cells match (ddp x2, batch 16; ddp x2, batch 16; ddp x2",
        ),
    ],
)
def test_no_cell_or_several_are_bad_input(cell: dict[str, Any], message: str, make_experiment: Make) -> None:
    experiment = make_experiment(GRID, exclude=[], published=[entry(**ONE), entry(**cell)])
    with pytest.raises(ExperimentError) as caught:
        make_plan(experiment, laptop())
    assert "published[1].cell: got " in str(caught.value) and message in str(caught.value)


def test_figures_of_epochs_need_trainings_and_are_of_their_batch(make_experiment: Make) -> None:
    experiment = make_experiment(GRID, published=[entry("val_loss", **ONE)])
    with pytest.raises(ExperimentError, match=r"published\[0\].metric: val_loss needs the section convergence"):
        make_plan(experiment, laptop())
    settings = {"epochs": 1, "seeds": 0, "global_batch_size": 32, "only": {"optimizer.lr": 0.1}}
    trained = entry("val_loss", strategy="ddp", devices=2, global_batch_size=32)
    make_plan(make_experiment(GRID, published=[trained], convergence=settings), laptop())
