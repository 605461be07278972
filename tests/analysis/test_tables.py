"""Derived tables: one test per formula, with numbers that a reader can check by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.common import throughput
from harness.analysis.doubts import doubts
from harness.analysis.step_times import step_times
from harness.analysis.trials import convergence
from harness.config.sections import Target
from harness.record.schema import EPOCHS, STEPS
from harness.report.tables.scaling import scaling_table
from tests.records import epochs_of, line, steps_of, trials_of


def window(rank: int, number: int, duration_s: float, weight: float, kind: str = "timed") -> dict[str, Any]:
    named = {"rank": rank, "window": number, "window_kind": kind, "steps": 1}
    return {**named, "duration_s": duration_s, "weight": weight}


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([window(0, 1, 2, 30), window(1, 1, 4, 30), window(0, 2, 3, 30), window(1, 2, 1, 30)], 120.0 / (4.0 + 3.0)),
        ([window(0, 1, 1, 10), window(1, 1, 2, 10)], 10.0),  # not 20: rank 0's times the world size; not 15: a mean
        ([window(0, 0, 100, 10, "warmup"), window(0, 1, 1, 10)], 10.0),
        ([window(0, 0, 1, 1, "warmup")], None),
        ([], None),
    ],
)
def test_throughput_is_all_samples_over_the_slowest_time(windows: list[dict[str, Any]], expected: float | None) -> None:
    assert throughput(windows) == pytest.approx(expected)


def test_a_trials_step_time_is_the_median_of_its_timed_steps_and_a_failed_one_has_missing_values_not_zeros() -> None:
    names = ["step_s", "wait_fraction", "peak_memory_bytes"]
    trials = trials_of([line("single"), line("ddp2", outcome="oom", devices=2)]).set_index("trial_id")
    assert trials.loc["single-b0", names].tolist() == pytest.approx([0.1, 0.25, 1000])  # the warm-up step took 9 s
    assert trials.loc["ddp2-b0", [*names, "throughput_per_s"]].isna().all()


def scaling_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    return ratios.scaling(trials_of(lines)).set_index("cell_id")


def test_scaling_against_the_base_paired_by_block() -> None:
    lines = []
    for block, factor in enumerate((1.0, 0.5, 2.0)):
        rates = (80.0 * factor, 90.0 * factor)
        lines += [line("single", block=block, rates=(100.0 * factor,)), line("ddp2", block=block, rates=rates)]
    assert set(scaling_of([{**one, "unit": "tokens"} for one in lines])["unit"]) == {"tokens"}
    row = scaling_of(lines).loc["ddp2"]
    assert row["speedup"] == pytest.approx(1.6)  # two shares at the slower rank's 80, against 100
    assert row["efficiency"] == pytest.approx(0.8)
    assert (row["low"], row["high"]) == (pytest.approx(1.6), pytest.approx(1.6))  # the drift cancels
    assert (row["blocks"], row["base_id"], row["base_throughput_per_s"]) == (3, "single", pytest.approx(100.0))


@pytest.mark.parametrize("blocks", [1, 2])
def test_fewer_than_three_blocks_have_a_range_and_no_interval(blocks: int) -> None:
    rates = (80.0, 60.0)[:blocks]
    lines = [line("single", block=block) for block in range(blocks)]
    lines += [line("ddp2", block=block, rates=(rate, rate)) for block, rate in enumerate(rates)]
    row = scaling_of(lines).loc["ddp2"]
    assert row["blocks"] == blocks
    for name in ("", "throughput_", "efficiency_"):
        assert pd.isna(row[f"{name}low"]) and pd.isna(row[f"{name}high"])
    assert (row["least"], row["most"]) == pytest.approx((2 * min(rates) / 100, 1.6))
    assert (row["efficiency_least"], row["efficiency_most"]) == pytest.approx((min(rates) / 100, 0.8))
    assert (row["throughput_least"], row["throughput_most"]) == pytest.approx((2 * min(rates), 160.0))


def cut(*environments: str | None, rates: tuple[float, ...] = (90.0, 80.0, 75.0)) -> list[dict[str, Any]]:
    """Return blocks of a base and of ddp; the first is of two invocations in ``environments``."""
    before, after = environments
    lines = [line("single", environment=before), line("ddp2", rates=(rates[0],) * 2, invocation=1, environment=after)]
    for block, rate in enumerate(rates[1:], 1):
        both = (line("single", block=block), line("ddp2", block=block, rates=(rate, rate)))
        lines += [one | {"invocation": 1, "environment": after} for one in both]
    return lines


def test_a_block_of_two_invocations_in_equal_environments_is_in_the_interval() -> None:
    row, rest = (scaling_of(lines).loc["ddp2"] for lines in (cut("a", "a"), cut("a", "a")[2:]))
    assert (row["blocks"], rest["blocks"]) == (3, 2) and pd.isna(row["excluded"])
    assert row["speedup"] == pytest.approx((1.8 * 1.6 * 1.5) ** (1 / 3)) and row["most"] == pytest.approx(1.8)
    assert row["low"] < 1.5 and pd.isna(rest["low"])


@pytest.mark.parametrize("environments", [("a", "b"), (None, "b"), (None, None)])
def test_a_block_in_other_or_unknown_environments_is_in_no_ratio(environments: tuple[str | None, str | None]) -> None:
    row = scaling_of(cut(*environments)).loc["ddp2"]
    assert row["blocks"] == 2 and row["most"] == pytest.approx(1.6)
    row = scaling_of(cut(*environments, rates=(80.0,))).loc["ddp2"]
    assert pd.isna(row["speedup"]) and row["throughput_per_s"] == pytest.approx(160.0)
    name = "environment not recorded" if None in environments else "other environment"
    assert row["excluded"] == f"{name}: invocation 1; what it is compared with ran in invocation 0"
    assert name in str(scaling_table(ratios.scaling(trials_of(cut(*environments, rates=(80.0,))))))


def test_a_block_cut_in_two_is_one_block_in_which_a_pair_of_one_invocation_counts_first() -> None:
    lines = [
        *cut("a", "a", rates=(90.0,)),
        line("ddp2", rates=(70.0, 70.0), attempt=2, environment="a"),
        line("ddp4", rates=(45.0,) * 4, invocation=2, environment="a"),
    ]
    found = scaling_of(lines)
    assert found.loc["ddp2", "speedup"] == pytest.approx(1.4) and found.loc["ddp4", "speedup"] == pytest.approx(1.8)
    lines = [line("single"), line("ddp2", rates=(80.0, 80.0)), line("ddp4", invocation=1, rates=(160.0,) * 4)]
    again = {"invocation": 1, "rates": (200.0,)}
    lines += [line("single", attempt=2, **again), line("single", block=1, **again)]
    assert scaling_of(lines)["blocks"].to_dict() == {"single": 2, "ddp2": 1, "ddp4": 1}


def test_where_the_base_did_not_run_the_smallest_of_the_same_strategy_and_batch_is_the_base() -> None:
    ddp = [line("ddp2", rates=(50.0, 50.0)), line("ddp4", rates=(40.0,) * 4)]
    rows = scaling_of([line("single", outcome="oom"), *ddp, line("fsdp4", rates=(30.0,) * 4)])
    of_four = rows.loc["ddp4"]
    assert (of_four["base_id"], of_four["base_devices"]) == ("ddp2", 2)
    assert of_four[["speedup", "efficiency"]].tolist() == pytest.approx([160 / 100, 0.8])
    assert rows.loc["fsdp4", "base_id"] == "fsdp4"
    other = line("ddp4", rates=(40.0,) * 4, per_device_batch_size=20)
    assert scaling_of([line("single", outcome="error"), ddp[0], other]).loc["ddp4", "base_id"] == "ddp4"


@pytest.mark.parametrize(
    ("first", "second", "rate"),
    [
        ({"outcome": "lost"}, {}, 100.0),
        ({}, {"rates": (50.0,)}, 50.0),
        ({}, {"invocation": 1, "rates": (200.0,)}, 200.0),
        ({}, {"outcome": "oom"}, 100.0),
    ],
    ids=["a retried trial", "twice in an invocation", "in another invocation", "the second failed"],
)
def test_the_last_trial_that_measured_counts(first: dict[str, Any], second: dict[str, Any], rate: float) -> None:
    lines = [line("single", **first), line("single", attempt=2, **second)]
    cell = trial_tables.cells(trials_of(lines), steps_of(lines)).iloc[0]
    assert (cell["blocks"], cell["throughput_per_s"]) == (1, pytest.approx(rate)) and len(trials_of(lines)) == 2
    outcomes = trial_tables.outcomes(trials_of(lines))
    assert outcomes[["outcome", "trials"]].to_numpy().tolist() == [[lines[1]["outcome"], 1]]


def test_the_pilot_of_a_cell_is_its_first_blocks_in_whatever_order_they_were_measured() -> None:
    lines = [line("single", block=block, rates=(100.0 + block**3,)) for block in range(5)]
    in_order, resumed = (trial_tables.cells(trials_of(each), steps_of(each), pilot=3) for each in (lines, lines[::-1]))
    plain = trial_tables.cells(trials_of(lines), steps_of(lines))
    assert in_order["high"].iloc[0] == pytest.approx(resumed["high"].iloc[0]) != pytest.approx(plain["high"].iloc[0])


def test_cells_summarise_blocks_geometrically_and_come_in_the_order_of_the_strategies() -> None:
    lines = [line("single", block=block, rates=(rate,)) for block, rate in enumerate((100.0, 400.0, 200.0))]
    cell = trial_tables.cells(trials_of(lines), steps_of(lines)).iloc[0]
    assert (cell["blocks"], cell["throughput_per_s"]) == (3, pytest.approx(200.0))
    assert cell["low"] < 200.0 < cell["high"]
    assert cell["step_p5_s"] == pytest.approx(0.1)
    lines = [line(name, rates=(1.0,) * n) for name, n in (("fsdp2", 2), ("ddp2", 2), ("single", 1), ("ddp1", 1))]
    cells = trial_tables.cells(trials_of(lines), steps_of(lines))
    assert cells["cell_id"].tolist() == ["single", "ddp1", "ddp2", "fsdp2"]


def on_cuda(idle_s: float, host_wait_s: float, **columns: Any) -> dict[str, Any]:
    """Return a trial on a GPU with a window of 10 steps in 1 s whose phases are marked."""
    made = line("ddp2", rates=(100.0, 100.0), device="cuda", **columns)
    window = {"window": 2, "window_kind": "phases", "duration_s": 1.0, "steps": 10, "weight": 100.0}
    phases = {"idle_s": idle_s, "host_wait_s": host_wait_s}
    ranks = [{**window, "rank": 0, "idle_s": 0.0, "host_wait_s": 0.0}, {**window, "rank": 1, **phases}]
    return {**made, "windows": [*made["windows"], *ranks]}


@pytest.mark.parametrize(
    ("idle_s", "host_wait_s", "fraction"),
    [
        (0.7, 0.9, 0.7),  # the loader is too slow
        (0.9, 0.6, 0.6),  # partly: the rest of the idle time is the copy's
        (0.01, 0.9, 0.01),  # healthy: the host waits while the device computes
        (0.9, 0.01, 0.01),  # the host launches slowly, no batch is late
    ],
)
def test_on_cuda_a_wait_for_data_is_one_of_host_and_stream(idle_s: float, host_wait_s: float, fraction: float) -> None:
    lines = [on_cuda(idle_s, host_wait_s)]
    trials = trials_of(lines)
    assert trials["wait_fraction"].tolist() == [pytest.approx(fraction)]
    windows, ranks = trial_tables.windows(lines), trial_tables.ranks(lines)
    found = doubts(trials, steps_of(lines), windows, ranks, {}, EPOCHS.frame([]), lines)
    assert found.tolist() == [("waits for data",) if fraction > 0.5 else ()]


def test_on_cuda_without_marked_phases_the_wait_is_not_known() -> None:
    row = trials_of([line("single", device="cuda")]).iloc[0]
    assert pd.isna(row["wait_fraction"]) and row["step_s"] == pytest.approx(0.1)


TARGET = Target(metric="val_accuracy", at_least=0.9)


def training(accuracies: list[float], target: Target | None) -> pd.Series[Any]:
    trials = trials_of([line("ddp2", kind="convergence", rates=(1.0, 1.0))])
    return convergence(trials, epochs_of("ddp2-s0", accuracies), target).iloc[0]


def test_a_target_is_reached_at_the_first_epoch_that_has_it_or_has_no_time() -> None:
    row = training([0.5, 0.9, 0.8, 0.95], TARGET)
    assert bool(row["reached"]) is True
    assert (row["epochs_to_target"], row["samples_to_target"], row["time_to_target_s"]) == (2, 200, 2.0)
    assert row["target"] == "val_accuracy >= 0.9"
    assert row["best_val_accuracy"] == pytest.approx(0.95)
    row = training([0.5, 0.6], TARGET)
    assert bool(row["reached"]) is False
    assert pd.isna(row["time_to_target_s"]) and pd.isna(row["epochs_to_target"])
    assert training([0.5, 0.6, 0.7], Target(metric="val_loss", at_most=1.0))["epochs_to_target"] == 2
    assert pd.isna(training([0.5], None)["reached"])


def test_every_metric_of_the_last_epoch_is_carried_over_and_a_target_of_none_is_named() -> None:
    trials = trials_of([line("ddp2", kind="convergence", rates=(1.0, 1.0))])
    epochs = epochs_of("ddp2-s0", [0.5, 0.6]).assign(val_perplexity=[9.0, 7.0], val_own=[1.0, 3.0])
    row = convergence(trials, epochs, Target(metric="val_perplexity", at_most=8.0)).iloc[0]
    assert (row["val_accuracy"], row["val_perplexity"], row["val_own"]) == (0.6, 7.0, 3.0)
    assert row["epochs_to_target"] == 2
    row = training([0.5], Target(metric="val_f1", at_least=0.5))
    assert row["target"] == "val_f1: no such metric was recorded"
    assert pd.isna(row["reached"])


def test_nothing_recorded_or_nothing_but_failures_gives_empty_tables_with_their_columns() -> None:
    failed = [line("single", outcome="error"), line("ddp2", outcome="skipped", devices=2)]
    for lines in ([], failed):
        trials = trials_of(lines)
        outcomes = trial_tables.outcomes(trials)
        assert outcomes["trials"].sum() == len(lines) and len(outcomes.columns) > 3
        for table in (trial_tables.cells(trials, steps_of(lines)), ratios.scaling(trials)):
            assert table.empty and len(table.columns) > 3


# -- step times -------------------------------------------------------------------------------------------------------


def step(
    trial_id: str, attempt: int, step_s: float, wait_s: float | None = 0.0, warmup: bool = False
) -> dict[str, Any]:
    return {"trial_id": trial_id, "attempt": attempt, "warmup": warmup, "step_s": step_s, "wait_s": wait_s}


MIXED = [step("b", 1, 9.0, warmup=True), step("b", 1, 4.0, 1.0), step("a", 2, 2.0), step("b", 1, 6.0, 1.0)]
MIXED += [step("a", 1, 7.0, None), step("b", 1, 5.0, 1.0), step("w", 1, 1.0, warmup=True)]
TIMES = step_times(STEPS.frame(MIXED))


def test_each_attempt_has_the_quartiles_of_its_timed_steps_in_whatever_order_they_stand() -> None:
    by_trial = TIMES.by_trial
    assert sorted(by_trial.index) == [("a", 1), ("a", 2), ("b", 1)]  # the one with warm-up alone has none
    assert by_trial.loc[("b", 1)].tolist() == pytest.approx([4.5, 5.0, 5.5, 3.0 / 15.0])
    assert by_trial.loc[("a", 2), "step_median_s"] == 2.0


def test_the_fraction_of_waiting_is_that_of_longest_waits_and_slowest_ranks_also_if_all_ranks_steps_are_kept() -> None:
    kept = [[step("t", 1, 1.0, 0.5), step("t", 1, 4.0, 0.0)], [step("t", 1, 2.0, 0.0), step("t", 1, 3.0, 1.0)]]
    every = [{**row, "rank": rank} for rank, rows in enumerate(kept) for row in rows]
    reduced = [
        {**step("t", 1, 2.0, 0.5), "mean_s": 1.5, "rank": 1},
        {**step("t", 1, 4.0, 1.0), "mean_s": 3.5, "rank": 0},
    ]
    for rows in (every, reduced):
        assert step_times(STEPS.frame(rows)).by_trial["wait_fraction"].tolist() == [1.5 / 6.0]


def test_only_the_trials_that_count_are_in_a_cells_steps_and_without_steps_there_are_none() -> None:
    counted = pd.DataFrame({"trial_id": ["a", "b", "c"], "attempt": [2, 1, 1], "cell_id": ["x", "y", "z"]})
    steps = {cell_id: values.tolist() for cell_id, values in TIMES.of_cells(counted, "step_s").items()}
    assert steps == {"x": [2.0], "y": [4.0, 6.0, 5.0]}
    times = step_times(STEPS.frame([]))
    assert times.by_trial.empty
    assert times.of_cells(counted, "step_s") == {}
