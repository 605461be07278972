"""The text of the preview: its table and its sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.analysis.durations import Durations, TimedRun
from harness.analysis.preview import estimate_of, preview, savings
from harness.config.known_hardware import device_named
from harness.config.sections import Cost
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, make_plan
from harness.record.schema import PREVIEW
from harness.report.tables.preview import amount, grade_line, preview_lines, preview_table
from tests.conftest import Make

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8, "precision": "bf16"}
PRICE = {"per_device_hour": 2.5, "currency": "USD"}
EARLIER = TimedRun(Path("results/a/b"), 0.0, ("NVIDIA A100-SXM4-80GB",), Durations(), None, None)


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    timed = {"blocks": 2, "windows": 1, "window_seconds": 10.0, "warmup_seconds": 0.0}
    experiment = make_experiment(GRID, throughput=timed, convergence={"epochs": 1}, cost=PRICE, limits={"cost": 0.01})
    return make_plan(experiment, Inventory.assume(8, 8, device=device_named("H100-80GB")))


def row(**columns: Any) -> dict[str, Any]:
    return {"part": "total", "label": "total", "estimated_s": 80.0, "basis": "earlier run", **columns}


def cells_of(frame: pd.DataFrame, cost: Cost | None = None, **fits: str) -> dict[str, dict[str, str]]:
    table = preview_table(frame, cost, fits)
    titles = [heading.title for heading in table.columns]
    return {line.cells[0]: dict(zip(titles, line.cells, strict=True)) for line in table.rows}


def test_before_the_run_the_table_has_time_device_hours_and_money_and_whether_a_traced_cell_fits(plan: Plan) -> None:
    found = cells_of(preview(estimate_of(plan, None), 64), plan.experiment.cost)
    hours = {"device-hours": "0.356", "in use": "0.0056", "USD": "0.889"}
    assert found["single x1"] == {"part": "single x1", "trials": "2", "time": "at least 20 s", **hours}
    assert found["ddp x2 · convergence"]["time"] == "unknown"
    estimate = estimate_of(plan, None)
    cell_id = next(part.cell_id for part in estimate.parts if part.label == "ddp x2")
    found = cells_of(preview(estimate, 64), **{str(cell_id): "may not fit"})
    assert (found["ddp x2"]["memory"], found["ddp x1"]["memory"]) == ("may not fit", "")


def test_after_the_run_it_has_both_and_the_error() -> None:
    ran = row(actual_s=100.0, error=-0.2, planned_trials=6, measured_trials=5, device_hours=200.0)
    found = cells_of(PREVIEW.frame([ran]), Cost(per_device_hour=2.5, currency="USD"))["total"]
    assert found["trials"] == "5 of 6"
    assert (found["time, estimated"], found["time"], found["error"]) == ("1 min 20 s", "1 min 40 s", "-20 %")
    assert (found["device-hours"], found["USD"]) == ("200", "500")


@pytest.mark.parametrize(
    ("columns", "estimated", "error", "took", "hours"),
    [
        ({"actual_s": 100.0, "error": -0.2}, "1 min 20 s", " (-20 %)", "1 min 40 s", "0.2"),
        ({"actual_s": 70.0, "error": 0.14}, "1 min 20 s", " (+14 %)", "1 min 10 s", "0.286"),
        ({"actual_s": 80.0, "basis": "lower bound"}, "at least 1 min 20 s", "", "1 min 20 s", "0.25"),
        (  # with blocks: decide
            {"actual_s": 80.0, "basis": "lower bound", "planned_trials": 24, "measured_trials": 9},
            *("1 min 20 s", "", "1 min 20 s", "0.25"),
        ),
        (
            {"actual_s": 160.0, "basis": "unknown"},
            *("1 min 20 s", ", without the parts of unknown time", "2 min 40 s", "0.125"),
        ),
    ],
)
def test_the_grade_is_a_sentence_on_what_the_run_took_until_the_report(
    columns: dict[str, Any], estimated: str, error: str, took: str, hours: str
) -> None:
    frame = PREVIEW.frame([row(part="measurement", device_hours=0.25, **columns), row(actual_s=5.0)])
    assert grade_line(frame) == (
        f"Estimated before the run: {estimated} until the report{error}; it took {took}. "
        f"Device-hours: {hours} estimated, 0.25 used."
    )


@pytest.mark.parametrize("columns", [{"estimated_s": None, "actual_s": 70.0}, {}])
def test_without_an_estimate_or_a_run_there_is_no_grade(columns: dict[str, Any]) -> None:
    assert grade_line(PREVIEW.frame([row(part="measurement", **columns), row()])) == ""


def test_the_sentences_name_bound_unknown_parts_limit_and_idle_devices(plan: Plan) -> None:
    lines = preview_lines(plan, estimate_of(plan, None), None, savings(plan, None))
    total, limit, source, convergence, idle, smaller = lines
    assert total.startswith("Takes at least ") and " device-hours, " in total and " USD of 64 devices" in total
    assert total.endswith("and the convergence of 2 cells, the start of Ray, the report, of unknown time.")
    assert limit == "limits.cost ends the run after 0 s: trials that are left by then are skipped."
    assert source.startswith("No earlier run of these cells was found")
    assert convergence.startswith("Convergence: unknown, needs an earlier run of these cells")
    assert idle.startswith("At most 2 of the 64 devices work at once; on 2 alone the run takes ")
    assert smaller.startswith("A smaller study saves at least: 1 instead of 2 blocks, without intervals: ")
    assert "no cells on 2 devices" in smaller


def test_the_limit_counts_what_the_earlier_invocations_spent(make_experiment: Make) -> None:
    experiment = make_experiment({"devices": [1], "per_device_batch_size": 8}, limits={"device_hours": 1})
    plan = make_plan(experiment, Inventory.assume(1, 2))
    estimate = estimate_of(plan, None)

    def limit(spent_device_s: float) -> list[str]:
        return [line for line in preview_lines(plan, estimate, None, {}, spent_device_s) if "device_hours" in line]

    assert limit(0.0) == []
    assert limit(3598.0) == ["limits.device_hours ends the run after 1 s: trials that are left by then are skipped."]
    reached = "limits.device_hours was reached by the earlier invocations: every trial that is left is skipped."
    assert limit(3600.0) == [reached]


def test_an_earlier_run_of_other_devices_is_marked_and_savings_are_in_time_device_hours_and_money(plan: Plan) -> None:
    lines = preview_lines(plan, estimate_of(plan, EARLIER), EARLIER, {})
    source = next(line for line in lines if line.startswith("Estimated from results/a/b of 1970-01-01"))
    assert source.endswith("on NVIDIA A100-SXM4-80GB. The times are those of that hardware, not of H100-80GB.")
    assert "Not in it, so at least: single x1; ddp x1; ddp x2." in lines
    same = replace(EARLIER, hardware=("NVIDIA H100 80GB HBM3",))
    assert not any("not of H100" in line for line in preview_lines(plan, estimate_of(plan, same), same, {}))
    last = preview_lines(plan, replace(estimate_of(plan, EARLIER), bound="about"), EARLIER, {"less": 900.0})[-1]
    assert last == "A smaller study saves about: less: 15 min 00 s, 16 device-hours, 40 USD."


def test_amounts_are_short() -> None:
    values = (None, 0.0, 0.00123, 0.5, 12.34, 1234.5)
    assert [amount(value) for value in values] == ["-", "0", "0.0012", "0.5", "12.3", "1,234"]
