"""Published figures beside measured ones, from hand-made records; the section of the report."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from harness.analysis.published import published
from harness.config.published import Published
from harness.plan.run_environment import RunEnvironment
from harness.record.schema import EPOCHS, STEPS
from harness.report.tables.published import published_table, published_words
from harness.report.tables.text import NO_BREAK
from tests.records import line, trials_of

CELL = {"strategy": "ddp", "devices": 2}


def entry(metric: str, **given: Any) -> Published:
    basis = {"cell": CELL, "source": "A. Author", "hardware": "2 NVIDIA X100"}
    return Published.model_validate({**basis, "metric": metric, **given})


def step(trial: str, rank: int, window: int, number: int, seconds: float, loss: float) -> dict[str, Any]:
    names = ("trial_id", "attempt", "rank", "window", "step", "step_s", "loss")
    return dict(zip(names, (trial, 1, rank, window, number, seconds, loss), strict=True))


def table_of(
    *entries: Published,
    model: str = "NVIDIA X100",
    unit: str = "samples",
    diverged: int | None = None,
    inline: bool = False,
) -> pd.DataFrame:
    timed = {"unit": unit, "options": {"optimizer.lr": 1.0}, "facts": {"steady": True, "inline": inline}}
    outcomes = ["diverged" if seed == diverged else "ok" for seed in (0, 1)]
    lines = [
        *(line("ddp2", rates=(100.0, 50.0 + 10 * block), block=block, **timed) for block in (0, 1)),
        line("single", rates=(60.0,)),
        *(line("ddp2", rates=(1.0,) * 2, kind="convergence", seed=n, outcome=end) for n, end in enumerate(outcomes)),
    ]
    trials = trials_of(lines)
    curves = [
        {
            "trial_id": f"ddp2-s{seed}",
            "attempt": 1,
            "epoch": epoch,
            "train_loss": 3.0 - epoch + seed,
            "val_accuracy": 0.5,
        }
        for seed in (0, 1)
        for epoch in ((1,) if seed == diverged else (1, 2))
    ]
    rows = [
        step("ddp2-b0", rank, window, number, 1.0 + rank + window, loss)
        for rank in (0, 1)
        for window, number, loss in ((0, 0, 2.0), (0, 1, 4.0 + 2 * rank), (1, 0, math.nan))
    ]
    nodes: Any = [{"cpu": "a processor", "devices": [{"kind": "cuda", "model": model}]}]
    groups: Any = [{"nodes": nodes}]
    seen: RunEnvironment = {"groups": groups, "invocations": []}
    return published(entries, trials, EPOCHS.frame(curves), STEPS.frame(rows), seen)


def values(table: pd.DataFrame, *names: str) -> list[tuple[Any, ...]]:
    rows = table[list(names)].itertuples(index=False)
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows]


def test_epochs_are_compared_with_the_mean_over_seeds() -> None:
    table = table_of(entry("train_loss", values=[2.5, 2.0]), entry("val_accuracy", value=40, unit="%"))
    assert values(table, "epoch", "measured", "measured_low", "measured_high", "n") == [
        (1, 2.5, 2.0, 3.0, 2),
        (2, 1.5, 1.0, 2.0, 2),
        (None, 0.5, 0.5, 0.5, 2),
    ]
    assert table["difference"].tolist() == [0.0, -0.5, pytest.approx(0.1)]
    assert table["relative_difference"].tolist() == [0.0, -0.25, pytest.approx(0.25)]
    figures = [row.cells[1] for row in published_table(table).rows]
    assert figures == ["training loss, epoch 1", "training loss, epoch 2", "validation accuracy, last epoch"]


@pytest.mark.parametrize(("inline", "measured"), [(False, 2), (True, 0)])
@pytest.mark.parametrize(
    "figure", [{"metric": "throughput_per_s"}, {"metric": "step_s"}, {"metric": "step_s", "at": {"step": 1}}]
)
def test_trials_of_a_debugger_are_in_no_figure_of_speed(figure: dict[str, Any], inline: bool, measured: int) -> None:
    table = table_of(entry(value=1, **figure), entry("train_loss", value=1), inline=inline)
    at_step_1 = 1 if "at" in figure and measured else measured
    assert table["n"].tolist() == [at_step_1, 2]


RATE = (110.0, 100.0, 120.0, 2)
"""Of ddp on two devices: the mean of two blocks, and both of them."""


@pytest.mark.parametrize(
    ("figure", "measured", "difference"),
    [
        (entry("throughput_per_s", range=[90, 115]), RATE, 0.0),  # a difference is outside of a range only
        (entry("throughput_per_s", range=[120, 200]), RATE, -10.0),
        (entry("throughput_per_s", value=100, cell={**CELL, "optimizer.lr": 1}), RATE, 10.0),  # recorded as 1.0
        (entry("step_s", value=1), (0.1, 0.1, 0.1, 2), -0.9),
        (entry("peak_memory_bytes", value=1), (1001.0, 1001.0, 1001.0, 2), 1000.0),
        (entry("step_s", value=1, cell={"strategy": "dp", "devices": 2}), (None, None, None, 0), None),
    ],
)
def test_figures_of_a_cell_have_the_blocks_and_their_spread(
    figure: Published, measured: tuple[float | None, ...], difference: float | None
) -> None:
    table = table_of(figure)
    (found,) = values(table, "measured", "measured_low", "measured_high", "n", "difference")
    assert found == tuple(value if value is None else pytest.approx(value) for value in (*measured, difference))
    ((cell, cell_id),) = values(table, "cell", "cell_id")
    assert (cell, cell_id) == ("strategy dp, devices 2", None) or measured[0]


@pytest.mark.parametrize(
    ("counted", "published_in", "unit", "measured"),
    [
        ("samples", None, "samples/s", 110.0),
        ("tokens", None, "tokens/s", 110.0),
        ("tokens", "tokens/s", "tokens/s", 110.0),
        ("tokens", "samples/s", "samples/s", None),
    ],
)
def test_a_throughput_is_compared_in_the_unit_in_which_the_workload_counts(
    counted: str, published_in: str | None, unit: str, measured: float | None
) -> None:
    table = table_of(entry("throughput_per_s", value=100, unit=published_in), unit=counted)
    assert values(table, "metric_unit", "measured") == [(unit, pytest.approx(measured))]
    (row,) = published_table(table).rows
    assert f"throughput in {unit}" in row.cells
    assert ("counted in tokens" in row.cells) == (measured is None)


def test_steps_are_those_of_the_slowest_rank_and_a_seed_that_diverged_has_no_last_epoch() -> None:
    table = table_of(
        entry("step_s", value=1, at={"step": 1}),
        entry("loss", value=5, at={"step": 2}),
        entry("running_loss", values=[2, 3, "nan", 1]),
    )
    found = values(table, "step", "measured")
    assert found[:4] == [(1, 2.0), (2, 5.0), (1, 2.0), (2, 3.5)]
    assert table["step"].tolist()[4:] == [3, 4]
    assert math.isnan(table["measured"].to_numpy(float, na_value=-1)[4]) and table["n"].tolist()[5] == 0
    shown = [row.cells for row in published_table(table).rows]
    assert shown[4][2:4] == ("nan", "nan") and "both nan" in shown[4] and "not measured" in shown[5]
    last, first = (entry("train_loss", value=2, **place) for place in ({}, {"at": {"epoch": 1}}))
    assert values(table_of(last, first, diverged=1), "measured", "n") == [(1.0, 1), (2.5, 2)]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"metric": "val_accuracy", "value": 40, "unit": "%"}, ("40.00 %", "50.00 %", "+10.00 points (+25 %)")),
        ({"metric": "train_loss", "value": 2.0683, "at": {"epoch": 2}}, ("2.0683", "1.5000", "-0.5683 (-27 %)")),
        ({"metric": "train_loss", "value": 3640}, ("3,640", "1.5000", "-3,638 (-100 %)")),
        ({"metric": "train_loss", "value": 3.64e12}, ("3.64e+12", "1.5000", "-3.64e+12 (-100 %)")),
        ({"metric": "step_s", "range": [40, 45], "unit": "ms"}, ("40.0 to 45.0 ms", "100.0 ms", "+55.0 ms (+122 %)")),
        ({"metric": "step_s", "range": [0.9, 7.2]}, ("0.90 to 7.20 s", "100.0 ms", "-800.0 ms (-89 %)")),
        ({"metric": "throughput_per_s", "value": 110}, ("110", "110 (100 to 120)", "none")),
    ],
    ids=["percentage", "loss", "large loss", "exploded loss", "short range", "long range", "rate"],
)
def test_numbers_are_shown_in_units_that_suit_their_size(given: dict[str, Any], shown: tuple[str, ...]) -> None:
    (row,) = published_table(table_of(entry(**given))).rows
    cells = [cell.replace(NO_BREAK, " ") for cell in row.cells]
    published_text, measured, _, difference = cells[2:6]
    assert (published_text, measured.partition(" (1.0")[0].partition(" (2.0")[0], difference) == shown


@pytest.mark.parametrize(("model", "other"), [("NVIDIA X100", False), ("NVIDIA Y200", True)])
def test_other_hardware_is_marked(model: str, other: bool) -> None:
    table = table_of(entry("train_loss", values=[2.5]), model=model)
    assert values(table, "measured_on", "other_hardware") == [(model, other)]
    (row,) = published_table(table).rows
    assert (row.kind == "apart") == other and ("other hardware" in row.cells) == other
    words = published_words(table)
    assert f"Here: {model}." in words and "A. Author: 2 NVIDIA X100." in words
