"""Which cells of two runs have the same content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.analysis.common import content_key, differing_axes, matches
from harness.config.experiment import Experiment
from harness.plan.comparison import axes_of, check_axis
from harness.plan.planner import make_plan
from tests.conftest import gpu_cluster
from tests.records import line

Make = Callable[..., Experiment]


def row(**columns: Any) -> dict[str, Any]:
    known = line("ddp2", rates=(1.0, 1.0), options=columns.pop("options", {}))
    return {"device_ids": None, "variant": None, **known, **columns}


BUCKETS = [row(options={"ddp.bucket_cap_mb": size}) for size in (1, 25)]
BATCH = row(per_device_batch_size=20, global_batch_size=40)
STRONG = row(scaling="strong", devices=4, global_batch_size=40)


@pytest.mark.parametrize(
    ("one", "other", "by", "alike"),
    [
        (*BUCKETS, [], False),
        (*BUCKETS, ["ddp.bucket_cap_mb"], True),
        (*BUCKETS, ["model"], False),
        (BUCKETS[0], row(strategy="fsdp", options={"fsdp.mesh": "hybrid"}), ["strategy"], True),  # its own options
        (row(), row(devices=4, global_batch_size=40), ["devices"], True),  # the global batch follows from the devices
        (row(scaling="strong"), STRONG, ["devices"], False),
        (row(), row(devices=4, global_batch_size=40), ["global_batch_size"], False),
        (row(), BATCH, ["per_device_batch_size"], True),
        (row(), BATCH, ["global_batch_size"], True),
    ],
)
def test_cells_that_differ_in_a_named_axis_and_what_follows_from_it_have_one_key(
    one: dict[str, Any], other: dict[str, Any], by: list[str], alike: bool
) -> None:
    assert (content_key(one, by) == content_key(other, by)) is alike


def test_the_axes_in_which_cells_differ_are_named() -> None:
    assert differing_axes(*BUCKETS) == ["ddp.bucket_cap_mb"]


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
    axes = {"device_ids": [[6, 7], [0, 4]], "optimizer.lr": [0.1, 0.01, 1.0]}
    grid = {"strategy": ["dp"], "global_batch_size": 8, **axes}
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
