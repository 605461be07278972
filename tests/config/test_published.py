"""Published figures in an experiment file: what they say, and what is refused, with its place."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from harness.config.published import METRICS, UNITS, Published
from harness.errors import ExperimentError
from harness.record.schema import table_of
from tests.conftest import Make

BASIS: dict[str, Any] = {"cell": {"strategy": "ddp", "devices": 2}, "source": "A. Author", "hardware": "2 X100"}


@pytest.mark.parametrize(
    ("given", "level", "figures"),
    [
        ({"metric": "val_accuracy", "value": 74.79, "unit": "%"}, "epochs", [(None, 0.7479, 0.7479)]),
        ({"metric": "val_accuracy", "value": 0.5, "at": {"epoch": 3}}, "epochs", [(3, 0.5, 0.5)]),
        ({"metric": "train_loss", "values": [2, 1.5]}, "epochs", [(1, 2.0, 2.0), (2, 1.5, 1.5)]),
        ({"metric": "train_loss", "values": [2], "at": {"epoch": 4}}, "epochs", [(4, 2.0, 2.0)]),
        ({"metric": "running_loss", "values": [2.3, "nan"]}, "steps", [(1, 2.3, 2.3), (2, math.nan, math.nan)]),
        ({"metric": "step_s", "range": [40, 45], "unit": "ms"}, "cells", [(None, 0.04, 0.045)]),
        ({"metric": "step_s", "range": [6.7, 7.2], "at": {"step": 1}}, "steps", [(1, 6.7, 7.2)]),
        ({"metric": "peak_memory_bytes", "value": 2, "unit": "GiB"}, "cells", [(None, 2.0**31, 2.0**31)]),
    ],
)
def test_figures_are_in_the_unit_of_the_column(given: dict[str, Any], level: str, figures: list[Any]) -> None:
    found = Published.model_validate({**BASIS, **given})
    assert found.level == level
    near = partial(pytest.approx, nan_ok=True)
    assert [(at, near(low), near(high)) for at, low, high in found.figures] == figures


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": "val_acuracy", "value": 1}, ".metric: got 'val_acuracy'; did you mean 'val_accuracy'?"),
        ({"metric": "val_loss"}, ": got no figure; give exactly one of value, range and values"),
        ({"metric": "val_loss", "value": 1, "range": [1, 2]}, ": got value, range; give exactly one of"),
        ({"metric": "val_loss", "range": [2, 1]}, ": range: got [2.0, 1.0]; allowed: the lowest figure, then"),
        ({"metric": "val_loss", "value": 1, "at": {"step": 1}}, ": at: got step for val_loss; allowed: epoch"),
        ({"metric": "throughput_per_s", "value": 1, "at": {"epoch": 1}}, ": at: got epoch for throughput_per_s"),
        ({"metric": "throughput_per_s", "values": [1, 2]}, ": values: got several of throughput_per_s"),
        ({"metric": "loss", "value": 1}, ": at: loss is a figure of one step; give at: {step: n}"),
        ({"metric": "step_s", "value": 1, "unit": "min"}, ": unit: got 'min' for step_s; allowed: s, ms"),
        ({"metric": "val_loss", "value": 1, "at": {}}, ".at: give exactly one of epoch and step"),
        ({"metric": "val_loss", "value": 1, "souce": "x"}, ".souce: unknown key"),
        ({"metric": "val_loss", "value": 1, "cell": {"stategy": "dp"}}, ".cell: unknown axis 'stategy'"),
        ({"metric": "val_loss", "value": "much"}, ".value"),
    ],
)
def test_mistakes_are_named_with_their_place(given: dict[str, Any], message: str, make_experiment: Make) -> None:
    with pytest.raises(ExperimentError) as caught:
        make_experiment({"strategy": "ddp", "devices": 2, "per_device_batch_size": 4}, published=[{**BASIS, **given}])
    assert f"published[0]{message}" in str(caught.value)


def test_every_metric_is_a_column_and_has_a_unit() -> None:
    for name, metric in METRICS.items():
        assert metric.unit in UNITS
        assert name == "running_loss" or name in table_of(metric.level).names
