"""Tables as text, for the terminal and the report."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.convergence import convergence
from harness.analysis.doubts import CountedDoubt
from harness.analysis.ratios import noise, parity, versus
from harness.config.sections import Target
from harness.plan.comparison import LAUNCHERS
from harness.record.schema import CELLS, FINDINGS, NOISE, PARITY, SCALING, TRIALS, VERSUS, WATERFALL
from harness.record.schema.table import floats
from harness.report.labels import Row, plural
from harness.report.tables.cost import communication_table, compute_table, waterfall_table
from harness.report.tables.evidence import findings_table, imprecise, memory_table
from harness.report.tables.ratios import ratio
from harness.report.tables.scaling import (
    convergence_table,
    failure_table,
    outcome_table,
    scaling_by_setting,
    scaling_table,
)
from harness.report.tables.text import NO_BREAK, counts, duration, estimate, impossible_lines, percent, speed
from tests.records import epochs_of, line, steps_of, trials_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3600, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (None, "-"),
    ],
)
def test_durations_are_formatted_with_unit(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (99.44, "99.4"), (0.1234, "0.123"), (pd.NA, "-")])
def test_speeds_are_formatted_with_unit(value: object, text: str) -> None:
    assert speed(value) == text


def test_counts_and_plurals() -> None:
    assert counts(["ok", "oom", "ok"]) == "2 ok, 1 oom"
    assert (plural(1, "block"), plural(2, "block")) == ("1 block", "2 blocks")


def test_cells_that_no_machine_can_run_are_a_line_a_reason_and_one_for_the_rest() -> None:
    assert impossible_lines({}) == []
    assert impossible_lines({"a": 1, "b": 2}) == ["No machine can run 1 cell: a.", "No machine can run 2 cells: b."]
    assert impossible_lines({"a": 1, "b": 2, "c": 3}, most=1) == [
        "No machine can run 1 cell: a.",
        "No machine can run 5 more, for like reasons; plan.json has all.",
    ]


def scaling(blocks: int) -> pd.DataFrame:
    lines = [
        one
        for block in range(blocks)
        for one in (line("single", block=block), line("ddp2", block=block, rates=(80.0 + block, 80.0 + block)))
    ]
    return ratios.scaling(trials_of(lines))


def test_a_scaling_row_states_its_base_in_absolute_numbers() -> None:
    rows = scaling_table(scaling(1)).rows
    assert rows[0].kind == "base"
    assert rows[0].cells == (
        "single",
        "1",
        f"100{NO_BREAK}(n{NO_BREAK}={NO_BREAK}1)",
        "1",
        "base",
        "1",
        "single x1: 100",
    )
    assert tuple(cell.replace(NO_BREAK, " ") for cell in rows[1].cells) == (
        "ddp",
        "2",
        "160 (n = 1)",
        "1.60 (n = 1)",
        "80 % (n = 1)",
        "1",
        "single x1: 100",
    )


def test_intervals_are_shown_with_n() -> None:
    row = scaling_table(scaling(3)).rows[1]
    shown = [cell.replace(NO_BREAK, " ") for cell in row.cells]
    assert shown[2:6] == ["162 (157 to 167)", "1.62 (1.57 to 1.67)", "81 % (79 to 84 %)", "3"]


def test_two_blocks_are_shown_with_n_and_their_range_which_is_no_interval() -> None:
    row = scaling_table(scaling(2)).rows[1]
    shown = [cell.replace(NO_BREAK, " ") for cell in row.cells]
    assert shown[2:6] == ["161 (n = 2: 160 to 162)", "1.61 (n = 2: 1.60 to 1.62)", "80 % (n = 2: 80 to 81 %)", "2"]
    ((_, part),) = scaling_by_setting(scaling(2))
    shown = [cell.replace(NO_BREAK, " ") for cell in part.rows[1].cells]
    assert shown[1:] == ["161", "1.61", "80 % (n = 2: 80 to 81 %)", "2"]


def test_equal_blocks_have_no_range() -> None:
    row = Row(ratio=1.0, low=None, high=None, least=1.0, most=1.0, blocks=2)
    assert estimate(percent, row, "ratio").replace(NO_BREAK, " ") == "100 % (n = 2)"
    assert estimate(percent, Row(row, ratio=None), "ratio") == "-"


def test_parts_by_setting_name_their_base() -> None:
    ((name, part),) = scaling_by_setting(scaling(1))
    assert name == "resnet8 · batch 10/device (base: single x1: 100)"
    assert [heading.title for heading in part.columns] == [
        "strategy",
        "samples/s",
        "speedup",
        "efficiency",
        "n",
    ]
    assert [row.cells[0] for row in part.rows] == ["single x1", "ddp x2"]
    assert part.rows[1].cells[2] == "1.60"  # without its interval, which is that of efficiency


def test_doubts_are_a_column_in_html_and_a_mark_in_a_terminal() -> None:
    rows = scaling(3)
    wide, slow = CountedDoubt("wide spread", 1, 3), CountedDoubt("slow rank 1", 2, 3)
    usual = CountedDoubt("foreign load", 3, 3)
    rows["doubts"], rows["unusual"] = [(wide, usual), (slow, usual)], [(wide,), (slow,)]
    table = scaling_table(rows)
    assert table.columns[-1].title == "doubts, by blocks"
    assert [row.cells[-1] for row in table.rows] == ["wide spread (1 of 3)", "slow rank 1 (2 of 3)"]
    rows["unusual"] = [(), (slow,)]
    ((_, part),) = scaling_by_setting(rows)
    assert [row.cells[0] for row in part.rows] == ["single x1", "ddp x2 ?"]
    assert len(part.columns) == len(part.rows[0].cells) == 5


def test_doubts_that_are_usual_mark_no_cell() -> None:
    rows = scaling(3)
    rows["doubts"] = [(CountedDoubt("foreign load", 3, 3),)] * 2
    assert scaling_table(rows).columns[-1].title != "doubts, by blocks"
    ((_, part),) = scaling_by_setting(rows)
    assert [row.cells[0] for row in part.rows] == ["single x1", "ddp x2"]


def test_emulated_cells_are_marked() -> None:
    lines = [line("single"), line("dp2", rates=(50.0,), devices=2)]
    rows = scaling_table(ratios.scaling(trials_of(lines))).rows
    assert (rows[1].kind, rows[1].cells[0]) == ("apart", "dp (emulated)")


@pytest.mark.parametrize(
    ("reached_after", "shown"),
    [
        ((2, None, None), ("1 of 3", ">= 3.0")),
        ((2, 1, None), ("2 of 3", "2.0 (1.0 to not reached)", "200 (100 to not reached)")),
        ((2, 1, 3), ("3 of 3", "2.0 (1.0 to 3.0)", "200 (100 to 300)")),
    ],
)
def test_a_seed_that_misses_the_target_counts_as_infinite_in_the_median(
    reached_after: tuple[int | None, ...], shown: tuple[str, ...]
) -> None:
    lines = [line("ddp2", kind="convergence", rates=(1.0, 1.0), seed=seed) for seed in range(3)]
    curves = [
        epochs_of(one["trial_id"], [0.95 if epoch == after else 0.5 for epoch in (1, 2, 3)])
        for one, after in zip(lines, reached_after, strict=True)
    ]
    target = Target(metric="val_accuracy", at_least=0.9)
    (row,) = convergence_table(convergence(trials_of(lines), pd.concat(curves), target)).rows
    assert tuple(cell.replace(NO_BREAK, " ") for cell in row.cells[-len(shown) :]) == shown


def test_the_losses_of_a_cell_are_written_alike_as_suits_the_largest() -> None:
    lines = [line("ddp2", kind="convergence", rates=(1.0, 1.0), seed=seed) for seed in range(2)]
    curves = [
        epochs_of(one["trial_id"], [0.5]).assign(val_loss=loss) for one, loss in zip(lines, (2.0, 4e9), strict=True)
    ]
    table = convergence_table(convergence(trials_of(lines), pd.concat(curves), None))
    shown = dict(zip((heading.title for heading in table.columns), table.rows[0].cells, strict=True))
    assert shown["validation loss"].replace(NO_BREAK, " ") == "2e+09 (2 to 4e+09)"


def test_an_unreached_target_is_shown_as_a_lower_bound() -> None:
    lines = [line("ddp2", kind="convergence", rates=(1.0, 1.0))]
    trials = trials_of(lines)
    target = Target(metric="val_accuracy", at_least=0.9)
    never = convergence_table(convergence(trials, epochs_of("ddp2-s0", [0.5]), target)).rows[0]
    assert never.cells[-2:] == ("0 of 1", ">= 1.0")
    once = convergence_table(convergence(trials, epochs_of("ddp2-s0", [0.95]), target)).rows[0]
    assert once.cells[-3:] == ("1 of 1", "1.0", "100")


@pytest.mark.parametrize(
    ("losses", "shown"),
    [
        (("0.5",), "0.5000"),
        (("nan",), "nan"),
        (("0.5", "inf", "nan"), "inf (0.5000 to nan)"),
        (("nan", "0.25", "0.5"), "0.5000 (0.2500 to nan)"),
        (("0.25", "0.5"), "0.3750 (0.2500 to 0.5000)"),
    ],
)
def test_losses_that_are_not_finite_are_shown_and_are_the_largest(losses: tuple[str, ...], shown: str) -> None:
    lines = [line("single", kind="convergence", seed=seed) for seed in range(len(losses))]
    curves = [epochs_of(one["trial_id"], [0.5]) for one in lines]
    epochs = pd.concat(curves, ignore_index=True).assign(train_loss=floats(map(float, losses)))
    found = convergence(trials_of(lines), epochs, None)
    assert [str(value) for value in found["train_loss"]] == [str(float(loss)) for loss in losses]
    (row,) = convergence_table(found).rows
    assert row.cells[3].replace(NO_BREAK, " ") == shown


def test_the_metrics_that_were_recorded_are_shown() -> None:
    lines = [line("single", kind="convergence")]
    trials = trials_of(lines)
    epochs = epochs_of("single-s0", [0.5]).assign(val_accuracy=pd.NA, val_perplexity=7.25, val_own=0.125)
    table = convergence_table(convergence(trials, epochs, None))
    shown = dict(zip((column.title for column in table.columns), table.rows[0].cells, strict=True))
    assert (shown["perplexity"], shown["own"]) == ("7.25", "0.125")
    assert "accuracy" not in shown and "PSNR" not in shown


def test_failures_name_their_log() -> None:
    lines = [line("single"), line("ddp2", outcome="error", devices=2, log="logs/x.txt", attempt=2)]
    rows = failure_table(trials_of(lines)).rows
    assert [row.cells for row in rows] == [("ddp x2, ddp2-b0", "2", "error", "because of error", "logs/x.txt")]


def test_outcomes_are_counted_with_their_reasons() -> None:
    lines = [line("single"), line("ddp2", outcome="skipped", devices=2), line("ddp4", outcome="skipped", devices=4)]
    rows = outcome_table(trial_tables.outcomes(trials_of(lines))).rows
    assert [row.cells for row in rows] == [
        ("throughput", "skipped", "2", "because of skipped"),
        ("throughput", "ok", "1", ""),
    ]


def test_compute_and_communication_are_shown_with_their_references() -> None:
    cells = CELLS.frame(
        [
            {
                "cell_id": "a",
                "strategy": "ddp",
                "devices": 2,
                "scaling": "weak",
                "per_device_batch_size": 8,
                "achieved_flops_per_s": 2e9,
                "of_measured_peak": 0.25,
            }
        ]
    )
    assert compute_table(cells).rows[0].cells[1:] == ("2", "2", "25 %", "no published peak")
    row = {"cell_id": "a", "strategy": "ddp", "devices": 2, "scaling": "weak", "per_device_batch_size": 8}
    waterfall = WATERFALL.frame([{**row, "part": "exposed communication", "part_s": 0.004}])
    trials = TRIALS.frame([{**row, "ddp_exposed_s": 0.001, "ddp_communication_s": None}])
    assert communication_table(waterfall, trials).rows[0].cells == ("2", "4.00", "1.00")


def test_equal_findings_show_each_observation() -> None:
    output = {"check": "versions", "severity": "error", "means": "m", "advice": "a", "model": None, "strategy": "ddp"}
    rows = [{**output, "devices": 2, "seen": seen} for seen in ("torch", "torch", "harness")]
    (row,) = findings_table(FINDINGS.frame(rows)).rows
    assert "torch; harness" in row.cells


@pytest.mark.parametrize(
    ("speeds", "precise", "sentence"),
    [((100.0, 100.1, 100.0), [True], ""), ((50.0, 100.0, 200.0), [False], "1 of 1 intervals are wider")],
)
def test_a_cell_that_is_compared_with_nothing_is_as_precise_as_its_own_speed(
    speeds: tuple[float, ...], precise: list[bool], sentence: str
) -> None:
    lines = [line("single", block=block, rates=(rate,)) for block, rate in enumerate(speeds)]
    rule = {"at_least": 3, "at_most": 3, "halfwidth": 0.05}
    found = ratios.scaling(trials_of(lines), rule)
    assert found["precise"].tolist() == precise
    reported = imprecise(ratio_tables(found))
    assert reported.startswith(sentence) and bool(reported) == bool(sentence)


def ratio_tables(scaling: pd.DataFrame, **others: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {**{table.name: table.frame([]) for table in (VERSUS, PARITY, NOISE)}, "scaling": scaling, **others}


def test_wide_ratios_of_strategies_launchers_and_twins_are_named() -> None:
    rates = (50.0, 100.0, 200.0)
    lines = []
    for block, rate in enumerate(rates):
        ddp = [line("ddp2", block=block, rates=(100.0, 100.0), launcher=name, strategy="ddp") for name in LAUNCHERS]
        ddp[1] |= {"cell_id": "ddp2t", "trial_id": f"ddp2t-b{block}", "base_id": None}
        base, dp = line("single", block=block), line("dp2", block=block, rates=(rate / 2, rate / 2), emulated=False)
        twin = {**base, "purpose": "twin", "kind": "diagnostic", "trial_id": f"single-b{block}t"}
        lines += [*ddp, dp, base, twin]
    lines[1::5] = [{**one, "windows": dp["windows"]} for one, dp in zip(lines[1::5], lines[2::5], strict=True)]
    trials = trials_of(lines)
    rule = {"at_least": 3, "at_most": 3, "halfwidth": 0.05}
    found = {name: make(trials, rule) for name, make in (("versus", versus), ("parity", parity), ("noise", noise))}
    precise = {name: frame["precise"].tolist() for name, frame in found.items()}
    assert precise == {"versus": [False], "parity": [False], "noise": [True]}
    reported = imprecise(ratio_tables(SCALING.frame([]), **found))
    assert reported.startswith("2 of 3 intervals are wider than throughput.blocks asks: ddp x2 / dp x2 · ray; ")
    assert "ddp x2 under Ray / torchrun" in reported


def test_precision_is_required_of_cells_not_of_bases() -> None:
    lines = [
        one
        for block, rate in enumerate((40.0, 80.0, 120.0))
        for one in (line("single", block=block), line("ddp2", block=block, rates=(rate, rate)))
    ]
    rule = {"at_least": 3, "at_most": 3, "halfwidth": 0.05}
    found = ratios.scaling(trials_of(lines), rule)
    assert found["precise"].isna().tolist() == [True, False]
    assert imprecise(ratio_tables(found)) == ("1 of 1 intervals are wider than throughput.blocks asks: ddp x2.")


def test_the_peak_of_the_construction_stands_beside_that_of_the_steps() -> None:
    one = line("ddp2", rates=(1.0, 1.0), device="cuda")
    known = {"parameter_bytes": 100, "gradient_bytes": 200, "optimizer_bytes": 300, "peak_memory_bytes": 900}
    one["ranks"] = [{**rank, **known, "build_peak_bytes": 5000 * (1 + rank["rank"])} for rank in one["ranks"]]
    trials = trials_of([one])
    table = memory_table(trial_tables.cells(trials, steps_of([one])), trial_tables.ranks([one]), trials)
    (row,) = table.rows
    shown = {heading.title: cell for heading, cell in zip(table.columns, row.cells, strict=True)}
    assert (shown["peak"], shown["rest"], shown["construction"]) == ("900 B", "300 B", "9.77 KiB")
    trials = trial_tables.trials([{**one, "device": "cpu"}], steps_of([one]))
    on_cpu = memory_table(trial_tables.cells(trials, steps_of([one])), trial_tables.ranks([one]), trials)
    assert not {"peak", "rest", "construction"} & {heading.title for heading in on_cpu.columns}
    assert on_cpu.rows[0].cells[-3:] == ("100 B", "200 B", "300 B")


def test_why_operations_were_not_counted_is_shown() -> None:
    lines = [line("single", facts={"flops_reason": "an LSTM is not counted"})]
    trials = trials_of(lines)
    (row,) = compute_table(trial_tables.cells(trials, steps_of(lines))).rows
    assert row.cells[2:] == ("not counted: an LSTM is not counted",)


ENDS = {"least": 0.45, "most": 0.55}


def test_the_waterfall_in_numbers_begins_each_cell_with_its_efficiency() -> None:
    axes = {"label": "ddp x2 · resnet8", "strategy": "ddp", "devices": 2}
    parts = (
        ("ideal", 0.6, 0.006, 0.55, 0.65),
        ("slowest rank", 0.5, 0.005, None, None),
        ("rest", -0.1, -0.001, -0.2, 0),
    )
    rows = [
        {**axes, "part": part, "share": share, "part_s": seconds, "low": low, "high": high, "blocks": 3, **ENDS}
        for part, share, seconds, low, high in parts
    ]
    table = waterfall_table(WATERFALL.frame(rows))
    assert [row.cells for row in table.rows] == [
        ("ddp x2 · resnet8", "ideal (efficiency)", "6.00", "60.0 %", "55.0 to 65.0 %", "3"),
        ("", "slowest rank", "5.00", "50.0 %", "n = 3: 45.0 to 55.0 %", "3"),
        ("", "rest", "-1.00", "-10.0 %", "-20.0 to 0.0 %", "3"),
    ]
    assert [row.kind for row in table.rows] == ["base", "", ""]
    short = waterfall_table(WATERFALL.frame(rows), most=2)
    assert [row.cells[1] for row in short.rows] == ["ideal (efficiency)", "slowest rank", ""]
    assert short.rows[-1].cells[0] == "and 1 more, in tables/waterfall.csv"


@pytest.mark.parametrize(
    ("value", "text"), [(0.98765, "0.988"), (9.9994, "9.999"), (12.3456, "12.3"), (1234.5, "1,234"), (None, "-")]
)
def test_a_large_ratio_has_three_digits(value: float | None, text: str) -> None:
    assert ratio(value) == text
