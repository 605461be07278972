"""Which cells of two runs match; conditions of --fail-if, and the exit code that follows from the verdicts."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis.common import Row, content_key, differing_axes, matches
from harness.analysis.compare import Condition, exit_code, gate, parse_condition
from harness.analysis.equivalence import Verdict
from harness.analysis.history import Metric, RunCell
from harness.analysis.run_pairs import Pair, Question, make_pair
from harness.config.axes import check_axis
from harness.plan.comparison import axes_of
from harness.plan.planner import make_plan
from tests.conftest import Make, gpu_cluster
from tests.records import line


def cell(name: str = "ddp2", speed: float = 1.0, verdict: Verdict | None = None) -> RunCell:
    row = {**line(name, rates=(1.0, 1.0)), "link": None, "device_ids": None, "variant": None}
    by_block: dict[Metric, tuple[float, ...]] = {"throughput": (speed,), "speedup": ()}
    return RunCell(row, [Row({"doubts": ()})], by_block, None, name == "single", None, verdict)


def pair(ratio: float, sd: float | None = 0.01, *, name: str = "ddp2", checked: str = "") -> Pair:
    """A cell that is faster by a ratio; ``checked``: in which runs it is not equivalent to one device."""
    different = Verdict("not equivalent", "it differs")
    first, later = (
        cell(name, speed, different if run in checked else None) for run, speed in (("A", 1.0), ("B", ratio))
    )
    return make_pair("B", first, later, Question(run_noise=sd), {})


BELOW = Condition("throughput", True, 0.95)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("throughput < 0.95", BELOW),
        ("throughput<95%", BELOW),
        ("  throughput  <  95 % ", BELOW),
        ("throughput < .95", BELOW),
        ("speedup > 1.1", Condition("speedup", False, 1.1)),
        ("speedup > 2", Condition("speedup", False, 2.0)),
    ],
)
def test_a_condition_is_a_metric_an_operator_and_a_number(text: str, condition: Condition) -> None:
    assert parse_condition(text) == condition
    assert parse_condition(str(condition)) == condition


@pytest.mark.parametrize(
    "text",
    ["", "throughput", "throughput < ", "throughput = 0.95", "throughput <= 0.9", "efficiency < 0.9", "throughput < 0",
     "throughput < -1", "throughput < nan", "throughput < 1e3", "0.95 > throughput", "throughput < 0.95 < 1"],
)  # fmt: skip
def test_anything_else_is_an_error_that_shows_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: METRIC < NUMBER or METRIC > NUMBER, such as 'throughput < 0.95'"):
        parse_condition(text)


@pytest.mark.parametrize(
    ("ratio", "sd", "verdict"),
    [
        (0.80, 0.01, "fails"),
        (1.00, 0.01, "passes"),
        (0.94, 0.01, "undecided"),
        (0.96, 0.01, "undecided"),
        (0.96, 0.0, "passes"),
        (0.95, 0.0, "undecided"),
        (0.50, None, "undecided"),
    ],
)
def test_a_cell_fails_or_passes_only_if_the_interval_excludes_the_threshold(
    ratio: float, sd: float | None, verdict: str
) -> None:
    assert gate([pair(ratio, sd)], [], [BELOW])["verdict"].tolist() == [verdict]
    above = Condition("throughput", False, 1.05)
    assert gate([pair(1.2), pair(1.0)], [], [above])["verdict"].tolist() == ["fails", "passes"]


def test_p_values_are_adjusted_over_all_cells() -> None:
    # log(0.93 / 0.95) over 0.01 sqrt(2) is -1.504: p = 0.1325; log(0.92 / 0.95) gives -2.269: p = 0.02327
    alone = gate([pair(0.92)], [], [BELOW])
    both = gate([pair(0.92), pair(0.93)], [], [BELOW])
    assert alone["p_adjusted"].tolist() == pytest.approx([0.02327], abs=1e-4)
    assert both["p_adjusted"].tolist() == pytest.approx([2 * 0.02327, 0.1325], abs=1e-3)
    assert alone["verdict"].tolist() == ["fails"]
    many = gate([pair(0.92), *[pair(0.93)] * 2], [], [BELOW])
    assert many["verdict"].tolist() == ["undecided"] * 3
    assert set(many["reason"]) == {"the interval, Holm-adjusted, holds the threshold"}


def test_what_is_not_equivalent_in_one_run_is_undecided_and_in_both_or_as_a_rehearsal_has_no_row() -> None:
    rows = gate([pair(0.5, checked="B"), pair(0.5, checked="AB"), pair(0.5, name="dp2")], [], [BELOW])
    assert rows[["verdict", "reason"]].values.tolist() == [["undecided", "B: it differs"]]


def test_a_base_has_no_verdict_on_its_speedup_and_a_planned_cell_without_a_measurement_is_undecided() -> None:
    speedup = Condition("speedup", True, 0.95)
    rows = gate([pair(1.0, name="single"), pair(1.0)], [], [speedup])
    assert rows[["strategy", "verdict"]].values.tolist() == [["ddp", "undecided"]]
    row = {**cell().first, "run": "B", "measured_in": "A"}
    lost = [{**row, "planned": True, "reason": "B: oom"}, {**row, "planned": False, "reason": "no cell of B"}]
    rows = gate([pair(1.0)], lost, [BELOW])
    assert rows["verdict"].tolist() == ["passes", "undecided"] and rows["reason"].iloc[1] == "B: oom"


@pytest.mark.parametrize(
    ("verdicts", "code"), [("passes passes", 0), ("passes undecided fails", 3), ("passes undecided", 4), ("", 4)]
)
def test_exit_codes(verdicts: str, code: int) -> None:
    assert exit_code(pd.DataFrame({"verdict": pd.Series(verdicts.split(), dtype="string")})) == code


# -- matching ---------------------------------------------------------------------------------------------------------


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


def test_the_axes_in_which_cells_differ_are_named_and_unknown_ones_an_error() -> None:
    assert differing_axes(*BUCKETS) == ["ddp.bucket_cap_mb"]
    assert [check_axis(name) for name in ("devices", "device", "ddp.bucket_cap_mb")]
    with pytest.raises(ValueError, match="unknown axis 'modle'; did you mean 'model'"):
        check_axis("modle")
    with pytest.raises(ValueError, match="unknown axis 'options'"):
        check_axis("options")


def test_only_is_a_value_or_one_of_several() -> None:
    assert matches(row(), {"strategy": "ddp", "devices": [1, 2]})
    assert not matches(row(), {"strategy": ["single"]})
    assert matches(row(options={"optimizer.lr": 0.1}), {"optimizer.lr": [0.1]})
    assert matches(row(device_ids="0,1"), {"device_ids": [[0, 1]]})


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
