"""The tables: their schema, typed frames, and CSV, JSON and Parquet as they are written and read."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

import numpy as np
import pandas as pd
import pytest
from typing_extensions import TypedDict

from harness.plan.rows import LinkRow, Meaning
from harness.record import frames
from harness.record.frames import csv_bytes, gather, in_parquet, read_frame, records, write_frame
from harness.record.reading import decode_json, encode_json
from harness.record.schema import COLLECTIVES, COMPARED, DERIVED, EPOCHS, LINKS, RECORDED, STEPS, TRIALS, WINDOWS
from harness.record.schema.table import Column, Table, columns_of
from harness.report.schema_page import as_markdown

README = Path(__file__).parents[2] / "results" / "README.md"


def test_results_readme_is_made_from_the_schema() -> None:
    assert README.read_text() == as_markdown(), "run: python -m harness.report.schema_page > results/README.md"


@pytest.mark.parametrize("table", [*RECORDED, *DERIVED, *COMPARED], ids=lambda table: table.name)
def test_names_are_unique_and_say_the_unit_and_every_column_has_a_meaning(table: Table) -> None:
    assert len(table.names) == len(set(table.names))
    for column in table.columns:
        assert column.meaning
        if column.name.endswith("_bytes"):
            assert column.unit == "bytes"
        if column.name.endswith("_per_s"):
            assert column.unit in ("samples/s", "FLOP/s", "bytes/s")
        elif column.name.endswith("_s"):
            assert column.unit == "s"


def test_a_frame_is_typed_and_missing_values_are_na_and_unknown_columns_come_last() -> None:
    frame = WINDOWS.frame([{"rank": 1, "duration_s": 2}])
    assert frame["rank"].dtype == "Int64"
    assert frame["duration_s"].dtype == "Float64"
    assert pd.isna(frame["trial_id"].iloc[0])
    assert list(frame.columns) == WINDOWS.names and list(TRIALS.frame([]).columns) == TRIALS.names
    assert list(WINDOWS.frame([{"own_metric": 3, "rank": 0}]).columns) == [*WINDOWS.names, "own_metric"]


class Example(TypedDict):
    name: Annotated[str, Meaning("a name")]
    seconds: NotRequired[Annotated[float | None, Meaning("a time", "s")]]
    kind: Annotated[Literal["a", "b"] | None, Meaning("a kind")]
    count: Annotated[int, Meaning("a number")]
    flag: Annotated[bool, Meaning("a flag")]
    options: Annotated[Mapping[str, object], Meaning("options")]
    rows: list[int]


def test_a_field_with_a_meaning_is_a_column_and_so_are_a_link_s_keys() -> None:
    assert columns_of(Example) == (
        Column("string", "name", "a name"),
        Column("Float64", "seconds", "a time", "s"),
        Column("string", "kind", "a kind"),
        Column("Int64", "count", "a number"),
        Column("boolean", "flag", "a flag"),
        Column("mapping", "options", "options"),
    )
    keys = set(get_type_hints(LinkRow))
    assert keys <= set(LINKS.names) and keys - {"source", "target", "link"} <= set(COLLECTIVES.names)


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
    parts_of = bytes(csv_bytes(FRAME.head(rows)))
    one, other = (pd.read_csv(io.BytesIO(text)) for text in (parts_of, FRAME.head(rows).to_csv(index=False).encode()))
    pd.testing.assert_frame_equal(one, other, check_exact=True, check_dtype=False)  # 1.0 is parts_of as 1
    numbers = np.random.default_rng(0).lognormal(sigma=5, size=1_000)
    exact = bytes(csv_bytes(pd.DataFrame({"x": numbers}))).splitlines()[1:]
    assert [float(number) for number in exact] == numbers.tolist()


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


def test_records_are_plain_values_and_missing_ones_are_none() -> None:
    rows = records(FRAME)
    assert repr(rows) == repr(FRAME.to_dict("records"))
    assert {type(value) for value in rows[0].values()} == {str, int, float, bool}
    assert [rows[1][name] for name in ("text", "count", "seconds", "flag")] == [None] * 4
    assert records(FRAME.head(0)) == []
    assert bytes(csv_bytes(FRAME.head(0)[["text", "count"]])) == b'"text","count"\n'


JSON_VALUES: dict[str, Any] = {
    "nothing": None,
    "flags": [True, False],
    "numbers": [0, -1, 2**62, 2**70, 0.1, -0.0, 1e22, 1e-7, 5e-324, 1.7976931348623157e308],
    "texts": ["", 'a "quoted" \\ line\n', "Ünïcödé \U0001f600", "\x00\x1f\u2028"],
    "tuples are lists": (1, (2, 3)),
    "objects": {"a": {"b": []}, "": {}},
    "numbers of numpy that are Python's": np.float64(0.1),
}


@pytest.mark.parametrize("value", JSON_VALUES.values(), ids=JSON_VALUES.keys())
def test_our_json_and_pythons_read_each_other(value: Any) -> None:
    expected = json.loads(json.dumps(value))
    assert json.loads(encode_json(value)) == expected
    assert decode_json(json.dumps(value).encode()) == expected
    assert "\n" not in encode_json(value)


def test_every_bit_of_a_number_is_kept() -> None:
    draw = random.Random(0)
    numbers = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(5_000)]
    numbers += [draw.lognormvariate(0, 1) for _ in range(5_000)]
    finite = [number for number in numbers if math.isfinite(number)]
    assert decode_json(encode_json(finite).encode()) == finite
    assert json.loads(encode_json(finite)) == decode_json(json.dumps(finite).encode()) == finite


def test_non_finite_numbers_are_written_as_by_python_and_half_a_pair_as_a_question_mark() -> None:
    text = encode_json([math.nan, math.inf, -math.inf])
    assert text == "[NaN,Infinity,-Infinity]"
    first, *others = decode_json(text.encode())
    assert math.isnan(first) and others == [math.inf, -math.inf]
    half = encode_json({"said": "half \ud83d, whole \U0001f600"})  # a surrogate of no pair
    assert decode_json(half.encode()) == {"said": "half ?, whole \U0001f600"}


@pytest.mark.parametrize("data", [b"", b'{"a": 1', b"[1,]", b'{"a": 1}x', b"\xff", b"1" * 10_000, b"[" * 100_000])
def test_invalid_json_and_values_that_it_cannot_represent_are_refused(data: bytes) -> None:
    for value in (object(), np.int64(1), {"a": b"\xff"}):
        with pytest.raises(TypeError):
            encode_json(value)
    with pytest.raises((ValueError, RecursionError)):
        decode_json(data)


def parts_of(folder: Path, table: Any, *trials: dict[str, list[Any]]) -> list[tuple[str, int, Path]]:
    parts = [(f"trial{number}", number + 1, folder / f"{number}.parquet") for number in range(len(trials))]
    for (_, _, path), columns in zip(parts, trials, strict=True):
        path.write_bytes(in_parquet(table, columns))
    return parts


def test_gathered_rows_have_the_tables_types_and_name_their_trial(tmp_path: Path) -> None:
    one = {"rank": [0, 0], "warmup": [True, False], "step_s": [1, 2.5], "wait_s": [None, None], "loss": [0.5, None]}
    two = {"rank": [3], "warmup": [False], "step_s": [4.0], "wait_s": [0.25], "loss": [float("nan")]}
    frame = gather(STEPS, parts_of(tmp_path, STEPS, one, two))
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
    frame = gather(STEPS, parts_of(tmp_path, STEPS, {"rank": [0] * 4, "loss": losses}))
    write_frame(tmp_path / "steps.parquet", frame)
    again = read_frame(tmp_path / "steps.parquet", STEPS)
    for rows in (frame, again):
        assert [str(value) for value in rows["loss"]] == ["0.5", "nan", "inf", "<NA>"]
    pd.testing.assert_frame_equal(again, frame)


def test_a_workloads_own_metric_comes_last_and_need_not_be_in_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FILES", 1)
    frame = gather(EPOCHS, parts_of(tmp_path, EPOCHS, {"epoch": [1], "val_top5": [0.5]}, {"epoch": [1]}))
    assert frame.columns.tolist() == [*EPOCHS.names, "val_top5"]
    assert frame["val_top5"].tolist()[0] == 0.5 and pd.isna(frame["val_top5"].tolist()[1])


def test_a_frame_is_written_in_parts_and_reads_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "ROWS", 2)
    frame = STEPS.frame([{"trial_id": "a", "attempt": 1, "step": step, "loss": None} for step in range(5)])
    for rows in (frame, frame.head(0)):
        write_frame(tmp_path / "steps.parquet", rows)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "steps.parquet"), rows.reset_index(drop=True))
