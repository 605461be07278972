"""The labels of rows, from the columns that the analysis makes."""

from __future__ import annotations

from harness.analysis.ratios import scaling
from harness.report.labels import (
    Row,
    batch_words,
    cell_label,
    check_label,
    rows_of,
    settings,
    shown_strategy,
    spread_options,
)
from tests.records import line, trials_of

LINES = [
    line("single"),
    line("ddp2", rates=(90.0, 90.0), options={"ddp.bucket_cap_mb": 25, "optimizer.lr": 0.1}),
    line("ddp2b", rates=(80.0, 80.0), strategy="ddp", options={"ddp.bucket_cap_mb": 1, "optimizer.lr": 0.1}),
    line("dp2", rates=(70.0, 70.0), model="resnet14", per_device_batch_size=20, global_batch_size=40),
]
FRAME = trials_of(LINES)


def test_a_table_or_diagnostic_trials_alone_have_the_labels_of_their_run() -> None:
    """Also if only some of its cells are in the table."""
    rows = scaling(FRAME[FRAME["cell_id"].isin(["single", "ddp2"])])
    assert rows["label"].tolist() == [
        "single x1 · resnet8 · batch 10/device",
        "ddp x2 · resnet8 · batch 10/device · lr=0.1 · bucket_cap_mb=25",
    ]
    only = [line("ddp2", rates=(1.0, 1.0), kind="diagnostic", purpose="links")]
    assert trials_of(only)["label"].tolist() == ["ddp x2"]


def test_options_that_differ_become_columns_and_settings_hold_what_strategies_can_share() -> None:
    assert settings(FRAME)[0] == "resnet8 · batch 10/device"
    assert settings(FRAME)[1] == "resnet8 · batch 10/device · lr=0.1"
    assert settings(FRAME, batch=False)[3] == "resnet14"
    assert settings(FRAME, batch=False, own=True)[2] == "resnet8 · lr=0.1 · bucket_cap_mb=1"
    assert list(spread_options(FRAME).columns) == ["ddp.bucket_cap_mb"]
    assert settings(FRAME[:0]).tolist() == []


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
