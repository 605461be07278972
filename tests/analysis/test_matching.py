"""Which cells of two runs have the same content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.common import content_key, differing_axes, matches
from harness.config.axes import check_axis
from harness.config.experiment import Experiment
from harness.plan.comparison import axes_of
from harness.plan.planner import make_plan
from tests.conftest import gpu_cluster
from tests.records import line

Make = Callable[..., Experiment]


def row(**columns: Any) -> dict[str, Any]:
    return {
        "device_ids": None,
        "variant": None,
        **line("ddp2", rates=(1.0, 1.0), options=columns.pop("options", {})),
        **columns,
    }


def test_cells_that_differ_in_a_named_axis_have_one_key() -> None:
    one, other = row(options={"ddp.bucket_cap_mb": 1}), row(options={"ddp.bucket_cap_mb": 25})
    assert content_key(one) != content_key(other)
    assert content_key(one, ["ddp.bucket_cap_mb"]) == content_key(other, ["ddp.bucket_cap_mb"])
    assert content_key(one, ["model"]) != content_key(other, ["model"])
    assert differing_axes(one, other) == ["ddp.bucket_cap_mb"]


@pytest.mark.parametrize(
    ("scaling", "by", "alike"),
    [
        ("weak", "devices", True),  # the global batch follows from the devices
        ("strong", "devices", False),
        ("weak", "global_batch_size", False),
    ],
)
def test_the_batch_that_follows_is_no_content(scaling: str, by: str, alike: bool) -> None:
    one, other = row(scaling=scaling), row(scaling=scaling, devices=4, global_batch_size=40)
    assert (content_key(one, [by]) == content_key(other, [by])) is alike


def test_a_batch_is_compared_by_either_of_its_names() -> None:
    one, other = row(), row(per_device_batch_size=20, global_batch_size=40)
    for name in ("per_device_batch_size", "global_batch_size"):
        assert content_key(one, [name]) == content_key(other, [name])


def test_with_the_strategy_its_own_options_may_differ() -> None:
    one, other = row(options={"ddp.bucket_cap_mb": 1}), row(strategy="fsdp", options={"fsdp.mesh": "hybrid"})
    assert content_key(one, ["strategy"]) == content_key(other, ["strategy"])


def test_only_is_a_value_or_one_of_several() -> None:
    assert matches(row(), {"strategy": "ddp", "devices": [1, 2]})
    assert not matches(row(), {"strategy": ["single"]})
    assert matches(row(options={"optimizer.lr": 0.1}), {"optimizer.lr": [0.1]})
    assert matches(row(device_ids="0,1"), {"device_ids": [[0, 1]]})


def test_an_unknown_axis_is_an_error_with_the_nearest_name() -> None:
    assert [check_axis(name) for name in ("devices", "device", "ddp.bucket_cap_mb")]
    with pytest.raises(ValueError, match="unknown axis 'modle'; did you mean 'model'"):
        check_axis("modle")
    with pytest.raises(ValueError, match="unknown axis 'options'"):
        check_axis("options")


def test_a_recorded_row_matches_as_its_cell_does(make_experiment: Make) -> None:
    grid = {
        "strategy": ["dp"],
        "device_ids": [[6, 7], [0, 4]],
        "global_batch_size": 8,
        "optimizer.lr": [0.1, 0.01, 1.0],
    }
    experiment = make_experiment(grid, device="cuda")
    cells = {trial.cell for trial in make_plan(experiment, gpu_cluster()).trials}
    filters: list[dict[str, Any]] = [
        {"device_ids": [6, 7]},
        {"device_ids": [6, 7], "optimizer.lr": 0.1},
        {"optimizer.lr": 1},
        {"optimizer.lr": [0.1, 1]},
        {"strategy": ["dp", "single"], "devices": 2},
        {"compile": False, "data": "digits"},
    ]
    for wanted in filters:
        matched = [cell for cell in cells if cell.matches(wanted)]
        assert matched and matched == [cell for cell in cells if matches(dict(axes_of(cell)), wanted)]
