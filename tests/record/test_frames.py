"""Rows and CSV of a frame agree with those of pandas."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from harness.record.frames import csv_bytes, records

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


@pytest.mark.parametrize("rows", [4, 1])
def test_csv_files_read_the_same_as_those_of_pandas(rows: int) -> None:
    written = bytes(csv_bytes(FRAME.head(rows)))
    one, other = (pd.read_csv(io.BytesIO(text)) for text in (written, FRAME.head(rows).to_csv(index=False).encode()))
    pd.testing.assert_frame_equal(one, other, check_exact=True, check_dtype=False)  # 1.0 is written as 1


def test_csv_as_it_is_written() -> None:
    frame = FRAME.copy()
    frame["self"] = [[], ["slow", 'a "b"'], None, {"a": 1}]
    assert bytes(csv_bytes(frame)).decode().splitlines() == [
        '"text","count","seconds","flag","further","mixed","self"',
        '"plain",1,0.1,true,1,"a","[]"',
        """,,,,,,"['slow', 'a ""b""']\"""",
        '"a ""quoted"", one",-3,1e-7,false,3e+300,"1",',
        '"two',
        """lines",4,1e+16,true,0.1,"2.5","{'a': 1}\"""",
    ]


def test_numbers_in_csv_are_exact() -> None:
    numbers = np.random.default_rng(0).lognormal(sigma=5, size=1_000)
    written = bytes(csv_bytes(pd.DataFrame({"x": numbers}))).splitlines()[1:]
    assert [float(number) for number in written] == numbers.tolist()


def test_records_are_plain_values_and_missing_ones_are_none() -> None:
    rows = records(FRAME)
    assert repr(rows) == repr(FRAME.to_dict("records"))
    assert {type(value) for value in rows[0].values()} == {str, int, float, bool}
    assert [rows[1][name] for name in ("text", "count", "seconds", "flag")] == [None] * 4
    assert records(FRAME.head(0)) == []
    assert bytes(csv_bytes(FRAME.head(0)[["text", "count"]])) == b'"text","count"\n'
