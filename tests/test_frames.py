"""Rows and CSV of a frame: exactly what pandas gives."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.frames import csv_text, records

FRAME = pd.DataFrame(
    {
        "text": pd.array(["plain", None, 'a "quoted", one', "two\nlines"], dtype="string"),
        "count": pd.array([1, None, -3, 4], dtype="Int64"),
        "seconds": pd.array([0.1, None, 1e-7, 1e16], dtype="Float64"),
        "flag": pd.array([True, None, False, True], dtype="boolean"),
        "further": [1.0, float("nan"), 3e300, 0.1],
        "mixed": pd.Series(["a", None, 1, 2.5], dtype=object),
    }
)


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_csv_is_byte_for_byte_what_pandas_writes(rows: int) -> None:
    assert csv_text(FRAME.head(rows)) == FRAME.head(rows).to_csv(index=False)


def test_records_are_plain_values_and_what_is_missing_is_none() -> None:
    rows = records(FRAME)
    assert repr(rows) == repr(FRAME.to_dict("records"))
    assert {type(value) for value in rows[0].values()} == {str, int, float, bool}
    assert [rows[1][name] for name in ("text", "count", "seconds", "flag")] == [None] * 4


def test_no_rows_are_no_records() -> None:
    assert records(FRAME.head(0)) == []
