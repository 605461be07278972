"""The rows of a trial by rank, which are kept as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.record import lines
from harness.record.folder import RunFolder
from harness.record.lines import Rows
from harness.record.reading import check_integers
from tests.conftest import Make
from tests.run_folders import make_run

ROWS: list[dict[str, Any]] = [
    {"rank": 0, "window_kind": "timed", "duration_s": 1.5, "steps": 3, "weight": 2.0, "wait_s": None},
    {"rank": 1, "window_kind": "alone", "duration_s": float("inf"), "steps": 3, "weight": 2, "in_turn_s": 0.25},
    {"rank": 2**40, "duration_s": -0.0, "steps": 3, "weight": 2.0, "odd": [1, {"a": True}]},
]


def test_rows_kept_as_bytes_are_the_same_rows() -> None:
    kept = Rows(ROWS)
    assert [*kept] == ROWS and kept == ROWS and len(kept) == 3 and kept != ROWS[:2]
    assert (kept[1], kept[-1], kept[1:]) == (ROWS[1], ROWS[2], ROWS[1:])
    for row, given in zip(kept, ROWS, strict=True):
        assert {name: type(value) for name, value in row.items()} == {name: type(v) for name, v in given.items()}
    assert Rows([]) == [] and str(kept[2]["duration_s"]) == "-0.0"
    with pytest.raises(IndexError):
        kept[3]


def test_trials_are_read_with_their_rows_by_rank_which_are_gathered_as_they_were_read(
    make_experiment: Make, tmp_path: Path
) -> None:
    experiment = make_experiment({"strategy": "ddp", "devices": [1, 2], "per_device_batch_size": 8})
    kept = RunFolder(make_run(tmp_path, experiment, lambda cell, block: 100.0)).lines()
    plain: Any = [{**line, "ranks": [*line["ranks"]], "windows": [*line["windows"]]} for line in kept]
    assert any(isinstance(line["windows"], Rows) for line in kept) and kept == plain
    lines.gather_by_rank(tmp_path, plain)
    gathered = (tmp_path / lines.GATHERED).read_bytes()
    lines.gather_by_rank(tmp_path, kept)
    assert gathered and (tmp_path / lines.GATHERED).read_bytes() == gathered


def test_an_integer_of_more_than_64_bits_is_named_in_whichever_row() -> None:
    check_integers([{"a": 2**63 - 1, "b": 1e300}, {"a": -(2**63), "c": True}])
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"^b: got an integer of more than 64 bits$"):
            check_integers([{"a": 5, "b": 0.5}, {"a": None, "b": value}])
