"""Small Parquet files of one trial each, gathered into one frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.record import parquet
from harness.record.parquet import gather, in_parquet, read_frame, write_frame
from harness.record.schema import EPOCHS, STEPS


def written(folder: Path, table: Any, *trials: dict[str, list[Any]]) -> list[tuple[str, int, Path]]:
    parts = [(f"trial{number}", number + 1, folder / f"{number}.parquet") for number in range(len(trials))]
    for (_, _, path), columns in zip(parts, trials, strict=True):
        path.write_bytes(in_parquet(table, columns))
    return parts


def test_gathered_rows_have_the_tables_types_and_name_their_trial(tmp_path: Path) -> None:
    one = {"rank": [0, 0], "warmup": [True, False], "step_s": [1, 2.5], "wait_s": [None, None], "loss": [0.5, None]}
    two = {"rank": [3], "warmup": [False], "step_s": [4.0], "wait_s": [0.25], "loss": [float("nan")]}
    frame = gather(STEPS, written(tmp_path, STEPS, one, two))
    assert frame.columns.tolist() == STEPS.names
    assert [str(dtype) for dtype in frame.dtypes] == [column.dtype for column in STEPS.columns]
    assert frame["trial_id"].tolist() == ["trial0", "trial0", "trial1"]
    assert frame["attempt"].tolist() == [1, 1, 2]
    assert frame["step_s"].tolist() == [1.0, 2.5, 4.0]
    assert frame["wait_s"].isna().tolist() == [True, True, False]
    assert frame["loss"].isna().tolist() == [False, True, False]  # a loss that is not a number keeps its value
    assert np.isnan(frame["loss"].tolist()[2])
    assert frame["window"].isna().all()
    assert gather(STEPS, []).columns.tolist() == STEPS.names
    with pytest.raises(ValueError, match="Could not convert"):
        in_parquet(STEPS, {"step_s": ["fast"]})


def test_a_loss_that_is_not_finite_keeps_its_value_also_when_it_is_compacted(tmp_path: Path) -> None:
    losses = [0.5, float("nan"), float("inf"), None]
    frame = gather(STEPS, written(tmp_path, STEPS, {"rank": [0] * 4, "loss": losses}))
    write_frame(tmp_path / "steps.parquet", frame)
    again = read_frame(tmp_path / "steps.parquet", STEPS)
    for rows in (frame, again):
        assert [str(value) for value in rows["loss"]] == ["0.5", "nan", "inf", "<NA>"]
    pd.testing.assert_frame_equal(again, frame)


def test_a_workloads_own_metric_comes_last_and_need_not_be_in_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "FILES", 1)
    frame = gather(EPOCHS, written(tmp_path, EPOCHS, {"epoch": [1], "val_top5": [0.5]}, {"epoch": [1]}))
    assert frame.columns.tolist() == [*EPOCHS.names, "val_top5"]
    assert frame["val_top5"].tolist()[0] == 0.5 and pd.isna(frame["val_top5"].tolist()[1])


def test_a_frame_is_written_in_parts_and_reads_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS", 2)
    frame = STEPS.frame([{"trial_id": "a", "attempt": 1, "step": step, "loss": None} for step in range(5)])
    for rows in (frame, frame.head(0)):
        write_frame(tmp_path / "steps.parquet", rows)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "steps.parquet"), rows.reset_index(drop=True))
