"""Achieved FLOP/s against the device's peak, from hand-made records."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.hardware import peak_flops
from tests.records import line, steps_of

H100 = "NVIDIA H100 80GB HBM3"
COUNTED = {"steady": True, "flops_per_unit": 3e9, "flops_reason": ""}


def cell_of(
    *facts: dict[str, Any], model: str = "some CPU", rates: tuple[float, ...] = (100.0,), **columns: Any
) -> Any:
    """Return the cells row of one cell, with a block for each of these facts."""
    name = "ddp2" if len(rates) > 1 else "single"
    lines = [line(name, block=block, facts=result, rates=rates, **columns) for block, result in enumerate(facts)]
    for one in lines:
        one["ranks"] = [{**rank, "device_model": model} for rank in one["ranks"]]
    (row,) = trial_tables.cells(trial_tables.trials(lines, steps_of(lines)), steps_of(lines)).to_dict("records")
    return row


def test_achieved_is_flops_of_a_sample_times_the_samples_of_one_device() -> None:
    assert cell_of(COUNTED)["achieved_flops_per_s"] == pytest.approx(3e11)
    assert cell_of(COUNTED, rates=(100.0, 100.0))["achieved_flops_per_s"] == pytest.approx(3e11)


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 67e12), ("bf16", 989.4e12)])
def test_mfu_is_achieved_over_the_published_peak_of_the_precision_in_effect(precision: str, peak: float) -> None:
    row = cell_of(COUNTED, model=H100, precision=precision)
    known = peak_flops(H100, precision)
    assert known and known.flops_per_s == pytest.approx(peak, rel=0.01)
    assert row["mfu"] == pytest.approx(3e11 / known.flops_per_s) and row["peak_source"] == known.source


@pytest.mark.parametrize("model", ["some CPU", f"{H100} + NVIDIA A100-SXM4-80GB"])
def test_without_a_known_peak_there_is_no_mfu(model: str) -> None:
    row = cell_of(COUNTED, model=model)
    assert pd.isna(row["mfu"]) and pd.isna(row["peak_source"]) and row["achieved_flops_per_s"] > 0


def test_the_measured_peak_is_the_best_that_any_block_saw() -> None:
    row = cell_of(*({**COUNTED, "measured_peak_flops_per_s": peak} for peak in (4e11, 6e11, 5e11)))
    assert row["of_measured_peak"] == pytest.approx(0.5)
    assert pd.isna(cell_of(COUNTED)["of_measured_peak"])


def test_every_cell_of_a_kind_of_device_has_the_same_measured_ceiling() -> None:
    lines = []
    for name, rates, peak in (("single", (100.0,), 6e11), ("ddp2", (100.0, 100.0), 4e11)):
        one = line(name, rates=rates, facts={**COUNTED, "measured_peak_flops_per_s": peak})
        lines.append(one | {"ranks": [{**rank, "device_model": "A", "threads": 1} for rank in one["ranks"]]})
    other = lines[1] | {"cell_id": "ddp2t", "trial_id": "ddp2t-b0"}
    lines.append(other | {"ranks": [{**rank, "threads": 2} for rank in other["ranks"]]})
    cells = trial_tables.cells(trial_tables.trials(lines, steps_of(lines)), steps_of(lines))
    of_peak = dict(zip(cells["cell_id"], cells["of_measured_peak"], strict=True))
    assert of_peak == pytest.approx({"single": 0.5, "ddp2": 0.5, "ddp2t": 0.75})


def test_ranks_that_share_a_device_have_no_mfu() -> None:
    facts = {**COUNTED, "measured_peak_flops_per_s": 6e11}
    row = cell_of(facts, model=H100, rates=(100.0, 100.0), oversubscribed=True)
    assert row["achieved_flops_per_s"] > 0 and pd.isna(row["mfu"]) and pd.isna(row["of_measured_peak"])


def test_missing_flops_have_a_reason() -> None:
    row = cell_of({"steady": True, "flops_reason": "an LSTM is not counted"})
    assert pd.isna(row["achieved_flops_per_s"]) and row["flops_reason"] == "an LSTM is not counted"
