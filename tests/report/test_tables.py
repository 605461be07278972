"""Tables as text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.doubts import CountedDoubt
from harness.analysis.ratios import noise, parity, versus
from harness.analysis.trials import convergence
from harness.config.axes import LauncherName
from harness.config.load import parse_experiment
from harness.config.sections import BlockRule, Target
from harness.record.schema import CELLS, FINDINGS, NOISE, PARITY, SCALING, TRIALS, VERSUS, WATERFALL
from harness.record.schema.table import floats
from harness.report.row import (
    Row,
    batch_words,
    cell_label,
    check_label,
    plural,
    rows_of,
    settings,
    shown_strategy,
)
from harness.report.summary import asked
from harness.report.tables import text
from harness.report.tables.cost import communication_table, compute_table, waterfall_table
from harness.report.tables.ratios import ratio
from harness.report.tables.scaling import (
    MOST_EPOCHS,
    convergence_table,
    epoch_lines,
    epochs_table,
    failure_table,
    outcome_table,
    ranked_table,
    scaling_by_setting,
    scaling_table,
)
from harness.report.tables.trust import findings_table, imprecise, memory_table
from tests.records import epochs_of, line, steps_of, trials_of


@pytest.mark.parametrize(
    ("shown", "values", "texts"),
    [
        (text.duration, (0.4, 59.4, 60, 185), ("0 s", "59 s", "1 min 00 s", "3 min 05 s")),
        (text.duration, (3600, 7800, None), ("1 h 00 min", "2 h 10 min", "-")),
        (text.speed, (12345.6, 99.44, 0.1234, pd.NA), ("12,346", "99.4", "0.123", "-")),
        (ratio, (0.98765, 9.9994, 12.3456, 1234.5, None), ("0.988", "9.999", "12.3", "1,234", "-")),
    ],
)
def test_numbers_have_as_many_digits_as_their_size_asks(
    shown: Callable[[Any], str], values: tuple[Any, ...], texts: tuple[str, ...]
) -> None:
    assert tuple(map(shown, values)) == texts


def test_counts_plurals_and_cells_that_no_machine_can_run_have_a_line() -> None:
    assert text.counts(["ok", "oom", "ok"]) == "2 ok, 1 oom"
    assert (plural(1, "block"), plural(2, "block")) == ("1 block", "2 blocks")
    assert text.impossible_lines({}) == []
    one, two = "No machine can run 1 cell: a.", "No machine can run 2 cells: b."
    assert text.impossible_lines({"a": 1, "b": 2}) == [one, two]
    rest = "No machine can run 5 more, for like reasons; plan.json has all."
    assert text.impossible_lines({"a": 1, "b": 2, "c": 3}, most=1) == [one, rest]


def scaling_of(*rates: float, rule: dict[str, Any] | None = None) -> pd.DataFrame:
    """Return the scaling of ddp on two devices, each of these rates in a block, against 100 of one device."""
    lines = [line("single", block=block) for block in range(len(rates))]
    lines += [line("ddp2", block=block, rates=(rate, rate)) for block, rate in enumerate(rates)]
    return ratios.scaling(trials_of(lines), rule)


def scaling(blocks: int) -> pd.DataFrame:
    return scaling_of(*(80.0 + block for block in range(blocks)))


def cells_in(row: text.Line) -> list[str]:
    return [cell.replace(text.NO_BREAK, " ") for cell in row.cells]


def test_a_scaling_row_states_its_base_in_absolute_numbers() -> None:
    base, ddp = scaling_table(scaling(1)).rows
    assert base.kind == "base" and f"100{text.NO_BREAK}(n{text.NO_BREAK}={text.NO_BREAK}1)" in base.cells
    assert cells_in(base) == ["single", "1", "100 (n = 1)", "1", "base", "1", "10,000", "single x1: 100"]
    assert cells_in(ddp) == ["ddp", "2", "160 (n = 1)", "1.60 (n = 1)", "80 % (n = 1)", "1", "12,500", "single x1: 100"]
    lines = [line("single"), line("dp2", rates=(50.0,), devices=2)]
    dp = scaling_table(ratios.scaling(trials_of(lines))).rows[1]
    assert (dp.kind, dp.cells[0]) == ("apart", "dp (emulated)")


def test_intervals_are_shown_with_n_and_two_blocks_with_their_range_which_is_no_interval() -> None:
    shown = cells_in(scaling_table(scaling(3)).rows[1])
    assert shown[2:6] == ["162 (157 to 167)", "1.62 (1.57 to 1.67)", "81 % (79 to 84 %)", "3"]
    shown = cells_in(scaling_table(scaling(2)).rows[1])
    assert shown[2:6] == ["161 (n = 2: 160 to 162)", "1.61 (n = 2: 1.60 to 1.62)", "80 % (n = 2: 80 to 81 %)", "2"]
    ((_, part),) = scaling_by_setting(scaling(2))
    assert cells_in(part.rows[1])[1:] == ["161", "1.61", "80 % (n = 2: 80 to 81 %)", "2"]
    row = Row(ratio=1.0, low=None, high=None, least=1.0, most=1.0, blocks=2)  # equal blocks have no range
    assert text.estimate(text.percent, row, "ratio").replace(text.NO_BREAK, " ") == "100 % (n = 2)"
    assert text.estimate(text.percent, Row(row, ratio=None), "ratio") == "-"


def test_whether_a_difference_is_clear_depends_on_the_look() -> None:
    rows = scaling(3).assign(p_value=[None, 0.02])
    shown = {level: [cells_in(row)[6] for row in scaling_table(rows, level).rows] for level in (0.025, 0.01)}
    assert shown == {0.025: ["", "clear"], 0.01: ["", "leaning"]}


def test_the_ranked_table_has_the_fastest_of_each_setting_first_and_counts_the_others() -> None:
    (base, ddp), rows = scaling_table(scaling(3)).rows, scaling(3)
    ranked = ranked_table(rows)
    assert [row.cells[0] for row in ranked.rows] == ["ddp", "single"] and ranked.rest == ""
    assert [row.cells[-1] for row in ranked.rows] == [ddp.cells[-2], base.cells[-2]]  # the device time of samples
    apart = rows.assign(emulated=[False, True])
    assert [(row.cells[0], row.kind) for row in ranked_table(apart).rows][1:] == [("ddp (emulated)", "apart")]
    many = pd.concat([rows.assign(setting=f"model {number}") for number in range(8)])
    ranked = ranked_table(many)
    assert [row.cells[:2] for row in ranked.lines] == [(f"model {number}", "ddp") for number in range(8)]
    assert ranked.rest == "and 8 more, in the table Throughput and scaling"


def test_parts_by_setting_name_their_base() -> None:
    ((name, part),) = scaling_by_setting(scaling(1))
    assert name == "resnet8 · batch 10/device (base: single x1: 100)"
    assert [heading.title for heading in part.columns] == ["strategy", "samples/s", "speedup", "efficiency", "n"]
    assert [row.cells[0] for row in part.rows] == ["single x1", "ddp x2"]
    assert part.rows[1].cells[2] == "1.60"  # without its interval, which is that of efficiency


def test_doubts_are_a_column_in_html_and_a_mark_in_a_terminal_unless_they_are_usual() -> None:
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
    rows = scaling(3).assign(doubts=[(usual,)] * 2)
    assert scaling_table(rows).columns[-1].title != "doubts, by blocks"
    ((_, part),) = scaling_by_setting(rows)
    assert [row.cells[0] for row in part.rows] == ["single x1", "ddp x2"]


def trained(curves: list[pd.DataFrame], target: Target | None = None) -> pd.DataFrame:
    """Return the trainings of a cell, one a seed, with these epochs."""
    lines = [line("single", kind="convergence", seed=seed) for seed in range(len(curves))]
    named = [curve.assign(trial_id=one["trial_id"]) for one, curve in zip(lines, curves, strict=True)]
    return convergence(trials_of(lines), pd.concat(named, ignore_index=True), target)


def shown_of(trainings: pd.DataFrame) -> dict[str, str]:
    table = convergence_table(trainings)
    return dict(zip((heading.title for heading in table.columns), cells_in(table.rows[0]), strict=True))


@pytest.mark.parametrize(
    ("reached_after", "shown"),
    [
        ((None,), ("0 of 1", ">= 3.0")),
        ((1,), ("1 of 1", "1.0", "100")),
        ((2, None, None), ("1 of 3", ">= 3.0")),
        ((2, 1, None), ("2 of 3", "2.0 (1.0 to not reached)", "200 (100 to not reached)")),
        ((2, 1, 3), ("3 of 3", "2.0 (1.0 to 3.0)", "200 (100 to 300)")),
    ],
)
def test_a_seed_without_the_target_is_infinite(reached_after: tuple[int | None, ...], shown: tuple[str, ...]) -> None:
    curves = [epochs_of("", [0.95 if epoch == after else 0.5 for epoch in (1, 2, 3)]) for after in reached_after]
    found = shown_of(trained(curves, Target(metric="val_accuracy", at_least=0.9)))
    assert tuple(found.values())[-len(shown) :] == shown


@pytest.mark.parametrize(
    ("losses", "shown"),
    [
        (("0.5",), "0.5000"),
        (("nan",), "nan"),
        (("0.5", "inf", "nan"), "inf (0.5000 to nan)"),
        (("nan", "0.25", "0.5"), "0.5000 (0.2500 to nan)"),
        (("0.25", "0.5"), "0.3750 (0.2500 to 0.5000)"),
        (("2", "4e9"), "2e+09 (2 to 4e+09)"),  # alike, as suits the largest
    ],
)
def test_losses_that_are_not_finite_are_shown_and_are_the_largest(losses: tuple[str, ...], shown: str) -> None:
    found = trained([epochs_of("", [0.5]).assign(train_loss=floats([float(loss)])) for loss in losses])
    assert [str(value) for value in found["train_loss"]] == [str(float(loss)) for loss in losses]
    assert shown_of(found)["training loss"] == shown


def test_the_metrics_that_were_recorded_are_shown() -> None:
    epochs = epochs_of("", [0.5]).assign(val_accuracy=pd.NA, val_perplexity=7.25, val_own=0.125)
    shown = shown_of(trained([epochs]))
    assert (shown["perplexity"], shown["own"]) == ("7.25", "0.125")
    assert "accuracy" not in shown and "PSNR" not in shown


def test_failures_name_their_log_and_outcomes_are_counted_with_their_reasons() -> None:
    lines = [line("single"), line("ddp2", outcome="error", devices=2, log="logs/x.txt", attempt=2)]
    rows = failure_table(trials_of(lines)).rows
    assert [row.cells for row in rows] == [("ddp x2, ddp2-b0", "2", "error", "because of error", "logs/x.txt")]
    lines = [line("single"), *(line(f"ddp{n}", outcome="skipped", devices=n) for n in (2, 4))]
    rows = outcome_table(trial_tables.outcomes(trials_of(lines))).rows
    skipped = ("throughput", "skipped", "2", "because of skipped")
    assert [row.cells for row in rows] == [skipped, ("throughput", "ok", "1", "")]


def test_compute_and_communication_are_shown_with_their_references() -> None:
    row = {"cell_id": "a", "strategy": "ddp", "devices": 2, "scaling": "weak", "per_device_batch_size": 8}
    cells = CELLS.frame([{**row, "achieved_flops_per_s": 2e9, "of_measured_peak": 0.25}])
    assert compute_table(cells).rows[0].cells[1:] == ("2", "2", "25 %", "no published peak")
    waterfall = WATERFALL.frame([{**row, "part": "exposed communication", "part_s": 0.004}])
    trials = TRIALS.frame([{**row, "exposed_s": {"all-reduce": 0.001}}])
    assert communication_table(waterfall, trials).rows[0].cells == ("2", "4.00", "1.00")
    cpu = {**row, "part": "CPU time of the exchange", "part_s": 0.003}  # of what was found by difference
    waterfall = WATERFALL.frame([{**row, "part": "exposed communication", "part_s": 0.004}, cpu])
    assert communication_table(waterfall, trials).rows[0].cells == ("2", "7.00", "3.00", "1.00")
    sparse = {**row, "part": "sparse gradients", "part_s": 0.002}
    waterfall = WATERFALL.frame([{**row, "part": "exposed communication", "part_s": 0.004}, cpu, sparse])
    assert communication_table(waterfall, trials).rows[0].cells == ("2", "9.00", "3.00", "1.00")
    lines = [line("single", facts={"flops_reason": "an LSTM is not counted"})]
    (why,) = compute_table(trial_tables.cells(trials_of(lines), steps_of(lines))).rows
    assert why.cells[2:] == ("not counted: an LSTM is not counted",)


def test_equal_findings_show_each_observation() -> None:
    output = {"check": "versions", "severity": "error", "means": "m", "advice": "a", "model": None, "strategy": "ddp"}
    rows = [{**output, "devices": 2, "seen": seen} for seen in ("torch", "torch", "harness")]
    (row,) = findings_table(FINDINGS.frame(rows)).rows
    assert "torch; harness" in row.cells


RULE = BlockRule(at_least=3, at_most=3, halfwidth=0.05)


def test_precision_is_required_of_cells_not_of_bases_but_of_a_base_that_is_compared_with_nothing() -> None:
    found = scaling_of(40.0, 80.0, 120.0, rule=RULE)
    assert found["precise"].isna().tolist() == [True, False]
    assert imprecise(ratio_tables(found)) == ("1 of 1 intervals are wider than throughput.blocks asks: ddp x2.")
    for speeds, precise in (((100.0, 100.1, 100.0), True), ((50.0, 100.0, 200.0), False)):
        lines = [line("single", block=block, rates=(rate,)) for block, rate in enumerate(speeds)]
        found = ratios.scaling(trials_of(lines), RULE)
        assert found["precise"].tolist() == [precise]
        assert imprecise(ratio_tables(found)).startswith("1 of 1 intervals are wider") == (not precise)
        assert bool(imprecise(ratio_tables(found))) == (not precise)


def ratio_tables(scaling: pd.DataFrame, **others: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {**{table.name: table.frame([]) for table in (VERSUS, PARITY, NOISE)}, "scaling": scaling, **others}


def test_wide_ratios_of_strategies_launchers_and_twins_are_named() -> None:
    rates = (50.0, 100.0, 200.0)
    lines = []
    for block, rate in enumerate(rates):
        ddp = [
            line("ddp2", block=block, rates=(100.0, 100.0), launcher=name, strategy="ddp")
            for name in get_args(LauncherName)
        ]
        ddp[1] |= {"cell_id": "ddp2t", "trial_id": f"ddp2t-b{block}", "base_id": None}
        base, dp = line("single", block=block), line("dp2", block=block, rates=(rate / 2, rate / 2), emulated=False)
        twin = {**base, "purpose": "twin", "kind": "diagnostic", "trial_id": f"single-b{block}t"}
        lines += [*ddp, dp, base, twin]
    lines[1::5] = [{**one, "windows": dp["windows"]} for one, dp in zip(lines[1::5], lines[2::5], strict=True)]
    trials = trials_of(lines)
    found = {name: make(trials, RULE) for name, make in (("versus", versus), ("parity", parity), ("noise", noise))}
    precise = {name: frame["precise"].tolist() for name, frame in found.items()}
    assert precise == {"versus": [False], "parity": [False], "noise": [True]}
    reported = imprecise(ratio_tables(SCALING.frame([]), **found))
    assert reported.startswith("2 of 3 intervals are wider than throughput.blocks asks: ddp x2 / dp x2 · ray; ")
    assert "ddp x2 under Ray / torchrun" in reported


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


def test_the_waterfall_in_numbers_begins_each_cell_with_its_efficiency() -> None:
    axes = {"label": "ddp x2 · resnet8", "strategy": "ddp", "devices": 2}
    shares = {"ideal": (0.6, 0.55, 0.65), "slowest rank": (0.5, None, None), "rest": (-0.1, -0.2, 0)}
    ends = {"least": 0.45, "most": 0.55, "blocks": 3}
    rows = [
        {**axes, **ends, "part": part, "share": share, "part_s": share / 100, "low": low, "high": high}
        for part, (share, low, high) in shares.items()
    ]
    table = waterfall_table(WATERFALL.frame(rows))
    assert [row.cells for row in table.rows] == [
        ("ddp x2 · resnet8", "ideal (efficiency)", "6.00", "60.0 %", "55.0 to 65.0 %", "3"),
        ("", "slowest rank", "5.00", "50.0 %", "n = 3: 45.0 to 55.0 %", "3"),
        ("", "unexplained", "-1.00", "-10.0 %", "-20.0 to 0.0 %", "3"),
    ]
    assert [row.kind for row in table.rows] == ["base", "", ""]
    short = waterfall_table(WATERFALL.frame(rows), most=2)
    assert [row.cells[1] for row in short.rows] == ["ideal (efficiency)", "slowest rank", ""]
    assert short.rows[-1].cells[0] == "and 1 more, in tables/waterfall.csv"


# -- text tables ------------------------------------------------------------------------------------------------------


COLUMNS = (
    ("cell", "cell", text.words),
    ("speed", lambda row: f"{row['speed']} (1 to 9)", text.flush_right, "speed"),
    ("share", "share", text.decimal("{:.0f} %", 100)),
    ("n", "n", text.flush_right),
    ("note", "note", text.words),
)
ROWS = [
    {"cell": name, "speed": speed, "share": share, "n": 3, "note": None}
    for name, speed, share in (("a", 10.0, None), ("b", 9.5, 0.5), ("c", float("inf"), 0.25))
]


def titles(table: text.TextTable) -> list[str]:
    return [heading.title for heading in table.columns]


def test_columns_that_no_row_fills_go_and_those_that_are_the_same_in_every_row_stand_above() -> None:
    assert titles(text.make_table(COLUMNS, ROWS)) == ["cell", "speed", "share", "n"]
    assert titles(text.make_table(COLUMNS, ROWS[:1])) == ["cell", "speed", "n"]
    assert titles(text.make_table(COLUMNS, [])) == ["cell", "speed", "share", "n", "note"]
    table = text.make_table(COLUMNS, [*ROWS, *ROWS[:2]], most=3, every="a file").without_constants()
    assert titles(table) == ["cell", "speed", "share"] and table.common == (("n", "3"),)
    assert [line.cells for line in table.lines] == [
        ("a", "10.0 (1 to 9)", "-"),
        ("b", "9.5 (1 to 9)", "50 %"),
        ("c", "inf (1 to 9)", "25 %"),
    ]
    assert table.rows[-1] == text.Line(("and 2 more, in a file", "", ""), "rest")
    assert table.rest == "and 2 more, in a file"
    assert titles(text.make_table(COLUMNS, ROWS[1:2]).without_constants()) == ["cell", "speed", "share", "n"]
    assert titles(text.make_table(COLUMNS, ROWS, ordered=True).without_constants()) == ["cell", "speed", "share", "n"]


def test_rows_sort_by_numbers_not_by_their_text_from_three_rows_on() -> None:
    table = text.make_table(COLUMNS, ROWS)
    assert [line.numbers for line in table.lines] == [
        (None, 10.0, None, 3.0),
        (None, 9.5, 0.5, 3.0),
        (None, None, 0.25, 3.0),  # infinite: after the others
    ]
    assert [*table.lines[1].values] == [("b", ""), ("9.5 (1 to 9)", "9.5"), ("50 %", "0.5"), ("3", "3")]
    assert text.make_table(COLUMNS, ROWS).is_sortable
    assert not text.make_table(COLUMNS, ROWS, most=2).is_sortable
    assert not text.make_table(COLUMNS, ROWS, ordered=True).is_sortable


# -- epochs -----------------------------------------------------------------------------------------------------------


def table_of(epochs: pd.DataFrame) -> list[tuple[str, ...]]:
    fixed: Any = {"kind": "convergence", "rates": (1.0, 1.0), "facts": {"training_samples": 1437}}
    lines = [line("ddp2", seed=seed, block=seed, **fixed) for seed in (0, 1)]
    table = epochs_table(epochs, trials_of(lines))
    return [tuple(heading.title for heading in table.columns), *(row.cells for row in table.rows)]


def test_the_table_has_every_epoch_or_some_of_a_long_training_and_always_the_last() -> None:
    epochs = epochs_of("ddp2-s1", [0.5, 0.75]).assign(learning_rate=[0.1, 0.01], train_accuracy=[0.6, 0.875])
    titles, first, second = table_of(epochs)
    metrics = ("training loss", "validation loss", "training accuracy", "validation accuracy", "learning rate")
    assert titles == ("strategy", "setting", "seed", "epoch", *metrics, "training samples")
    values = ("0.5000", "1.0000", "87.5 %", "75.0 %", "0.01")
    assert second == ("ddp x2", "global batch 20", "1", "2", *values, "1,437")
    assert first[titles.index("epoch")] == "1"
    titles, *rows = table_of(epochs_of("ddp2-s0", [0.5] * 45))
    shown = [int(row[titles.index("epoch")]) for row in rows]
    assert shown == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45] and len(shown) <= MOST_EPOCHS
    assert len(table_of(epochs_of("ddp2-s0", [0.5] * 20))) == 1 + 20


def test_the_metrics_of_a_script_have_their_own_names() -> None:
    epochs = epochs_of("ddp2-s0", [0.5]).assign(val_accuracy=pd.NA, train_loss=pd.NA, reported_accuracy=[91.5])
    titles, row = table_of(epochs.assign(val_f1=[0.25]))
    assert dict(zip(titles, row, strict=True)).items() >= {"reported accuracy": "91.5", "validation f1": "0.25"}.items()
    found = convergence(trials_of([line("ddp2", kind="convergence", rates=(1.0,))]), epochs, None)
    heads = [heading.title for heading in convergence_table(found).columns]
    assert "reported accuracy" in heads and "accuracy" not in heads
    assert epoch_lines({"epoch": [3], "train_loss": [None], "learning_rate": [None], "reported_f1": [0.5]}) == [
        "epoch 3: reported f1 0.5"
    ]


def test_lines_for_a_terminal_have_what_was_computed() -> None:
    timed = {"epoch": [1, 2], "samples": [1437, 2874], "train_s": [1.0, 2.0], "learning_rate": [0.1, 0.01]}
    losses = {"train_loss": [1.2, float("nan")], "val_loss": [0.5, None]}
    metrics = {"val_accuracy": [0.966, None], "val_iou": [None, None], "train_accuracy": [0.99, None]}
    epochs: dict[str, list[Any]] = {**timed, **losses, **metrics, "val_error": [0.034, None]}
    assert epoch_lines(epochs) == [
        "epoch 1: training loss 1.2000, validation loss 0.5000, training accuracy 99.0 %, validation accuracy 96.6 %, "
        "validation error 0.034, learning rate 0.1",
        "epoch 2: training loss nan, learning rate 0.01",
    ]
    assert epoch_lines({}) == []
    exploded = {"epoch": [1], "train_loss": [99_999.5], "val_loss": [1030116780714.67], "learning_rate": [0.1]}
    (words,) = epoch_lines(exploded)
    assert words == "epoch 1: training loss 99999.5000, validation loss 1.03e+12, learning rate 0.1"


# -- labels -----------------------------------------------------------------------------------------------------------


LINES = [
    line("single"),
    line("ddp2", rates=(90.0, 90.0), options={"ddp.bucket_cap_mb": 25, "optimizer.lr": 0.1}),
    line("ddp2b", rates=(80.0, 80.0), strategy="ddp", options={"ddp.bucket_cap_mb": 1, "optimizer.lr": 0.1}),
    line("dp2", rates=(70.0, 70.0), model="resnet14", per_device_batch_size=20, global_batch_size=40),
]
FRAME = trials_of(LINES)


def test_a_table_or_diagnostic_trials_alone_have_the_labels_of_their_run() -> None:
    """Also if only some of its cells are in the table."""
    rows = ratios.scaling(FRAME[FRAME["cell_id"].isin(["single", "ddp2"])])
    assert rows["label"].tolist() == [
        "single x1 · resnet8 · batch 10/device",
        "ddp x2 · resnet8 · batch 10/device · lr=0.1 · bucket_cap_mb=25",
    ]
    only = [line("ddp2", rates=(1.0, 1.0), kind="diagnostic", purpose="links")]
    assert trials_of(only)["label"].tolist() == ["ddp x2"]


def test_settings_hold_what_strategies_can_share() -> None:
    assert settings(FRAME)[0] == "resnet8 · batch 10/device"
    assert settings(FRAME)[1] == "resnet8 · batch 10/device · lr=0.1"
    assert settings(FRAME, batch=False)[3] == "resnet14"
    assert settings(FRAME, batch=False, own=True)[2] == "resnet8 · lr=0.1 · bucket_cap_mb=1"
    assert settings(FRAME[:0]).tolist() == []


def test_the_configuration_has_the_options_that_differ_between_cells() -> None:
    experiment = parse_experiment({"name": "test", "grid": {"per_device_batch_size": 8}}, source="x.yaml")
    configuration = dict(asked(SimpleNamespace(trials=FRAME, experiment=experiment, environment={})))  # type: ignore[arg-type]
    assert configuration["ddp.bucket_cap_mb"] == "25, 1" and "optimizer.lr" not in configuration


def test_a_strategy_is_named_with_its_own_options_and_what_sets_it_apart() -> None:
    rows = rows_of(FRAME)
    ddp = [f"ddp · bucket_cap_mb={size}" for size in (25, 1)]
    assert [shown_strategy(row) for row in rows] == ["single", *ddp, "dp (emulated)"]
    assert cell_label(rows[3]) == "dp (emulated) x2"
    assert cell_label(rows[1]) == "ddp x2 · bucket_cap_mb=25"
    assert check_label(rows[3]) == "dp (emulated) x2 · resnet14"


def test_the_batch_in_words_has_what_the_scaling_holds_fixed() -> None:
    weak = Row(scaling="weak", per_device_batch_size=64, global_batch_size=128, devices=2)
    assert batch_words(weak) == "batch 64/device" and batch_words(Row(weak, devices=1)) == "batch 64"
    assert batch_words(Row(weak, scaling="strong")) == "batch 64/device (global batch 128)"
    uneven = Row(weak, scaling="strong", per_device_batch_size=None, global_batch_size=25)
    assert batch_words(uneven) == "global batch 25"
