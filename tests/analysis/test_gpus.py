"""GPU readings by cell, from hand-made rank rows; NVML has tests of its own."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.hardware import gpus
from harness.report.tables.cost import gpu_table
from tests.records import line, steps_of

READINGS = {
    "gpu_utilisation": 0.9,
    "power_w": 300.0,
    "sm_clock_fraction": 1.0,
    "temperature_c": 60.0,
    "throttled": "",
    "energy_j": 1000.0,
    "samples_per_joule": 2.0,
}


def trial(cell: str, *ranks: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """Return a trial with these GPU readings of its ranks."""
    made = line(cell, rates=(100.0,) * len(ranks), **columns)
    return made | {"ranks": [{"rank": rank, **READINGS, **more} for rank, more in enumerate(ranks)]}


def gpus_of(lines: list[dict[str, Any]]) -> Any:
    return gpus(trial_tables.trials(lines, steps_of(lines)), trial_tables.ranks(lines))


def test_cell_values_are_means_over_ranks_or_the_worst_rank_for_limits() -> None:
    hot = {"temperature_c": 80.0, "power_w": 100.0, "sm_clock_fraction": 0.5, "gpu_utilisation": 0.5}
    found = gpus_of([trial("ddp2", {}, hot, block=0), trial("ddp2", {}, {}, block=1)])
    (row,) = found.to_dict("records")
    assert (row["strategy"], row["devices"], row["blocks"]) == ("ddp", 2, 2)
    assert row["power_w"] == pytest.approx(250.0) and row["gpu_utilisation"] == pytest.approx(0.8)
    assert (row["sm_clock_fraction"], row["temperature_c"]) == (0.5, 80.0)


def test_samples_per_joule_are_all_samples_over_all_energy() -> None:
    wasteful = {"energy_j": 3000.0, "samples_per_joule": 1.0}  # 2,000 samples of one rank, 3,000 of the other
    (row,) = gpus_of([trial("ddp2", {}, wasteful)]).to_dict("records")
    assert row["samples_per_joule"] == pytest.approx(5000 / 4000)


def test_a_rank_without_an_energy_reading_leaves_the_cell_without_energy() -> None:
    unknown = {"energy_j": None, "samples_per_joule": None}
    found = gpus_of([trial("ddp2", {}, {}, block=0), trial("ddp2", {}, unknown, block=1)])
    assert found["samples_per_joule"].isna().all() and found["power_w"].notna().all()
    assert "samples per joule" not in [heading.title for heading in gpu_table(found).columns]  # it would be empty


def test_a_rank_without_readings_leaves_sums_over_ranks_missing() -> None:
    unknown = dict.fromkeys(READINGS)
    found = gpus_of([trial("ddp2", {}, unknown)])
    assert found["samples_per_joule"].isna().all() and found["power_w"].tolist() == [300.0]
    (row,) = gpu_table(found).rows
    assert row.cells[6] == "not known"


def test_energy_alone_is_reported_too() -> None:
    energy = {**dict.fromkeys(READINGS), "energy_j": 3000.0, "samples_per_joule": 1.0}
    (row,) = gpus_of([trial("ddp2", {}, energy)]).to_dict("records")
    assert row["samples_per_joule"] == pytest.approx(5000 / 4000)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("", "", "no"),
        ("held by heat", "", "held by heat"),
        (None, "", "not known"),
        (None, "held by heat", "held by heat"),
        ("held by heat", "sw power cap, held by heat", "held by heat, sw power cap"),
    ],
)
def test_throttle_reasons_are_the_union_over_ranks(first: str | None, second: str, shown: str) -> None:
    (row,) = gpu_table(gpus_of([trial("ddp2", {"throttled": first}, {"throttled": second})])).rows
    assert row.cells[6] == shown


def test_the_gpu_table_has_readable_values() -> None:
    (row,) = gpu_table(gpus_of([trial("single", {})])).rows
    assert row.cells == ("single", "1", "90 %", "300", "100 %", "60", "no", "2", "1")


def test_cpu_failed_and_diagnostic_trials_have_no_gpu_rows() -> None:
    assert gpus_of([line("single")]).empty
    assert gpus_of([trial("single", {}, outcome="oom")]).empty
    assert gpus_of([trial("single", {}, purpose="twin", kind="diagnostic")]).empty
