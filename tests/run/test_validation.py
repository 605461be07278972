"""Validation of optimizers and schedules before anything starts."""

from __future__ import annotations

import pytest

from harness.errors import WorkloadError
from harness.plan.planner import make_plan
from harness.run.prepare import check_optimizers
from tests.conftest import Make, laptop


def test_optimizers_of_a_grid_share_their_options_and_the_error_says_so(
    make_experiment: Make,
) -> None:
    def check(**optimizer: object) -> None:
        axes = {"per_device_batch_size": 8, "optimizer.name": ["SGD", "Adam"]}
        check_optimizers(make_plan(make_experiment(axes, optimizer=optimizer), laptop()))

    check(lr=0.01)
    with pytest.raises(
        WorkloadError, match=r"optimizer\.momentum: Adam has no such option.*for each of Adam, SGD.*cells"
    ):
        check(lr=0.01, momentum=0.9)
    plain = make_experiment({"per_device_batch_size": 8}, optimizer={"name": "Adam", "momentum": 0.9})
    with pytest.raises(WorkloadError) as caught:
        check_optimizers(make_plan(plain, laptop()))
    assert "cells" not in str(caught.value)
