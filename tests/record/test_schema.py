"""The schema of every table: names, units, typed frames, the types of rows and the generated results/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NotRequired, get_type_hints

import pandas as pd
import pytest
from typing_extensions import TypedDict

from harness.plan.rows import LinkRow, Meaning
from harness.record.schema import COLLECTIVES, COMPARED, DERIVED, LINKS, RECORDED, TRIALS, WINDOWS
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


def test_a_field_with_a_meaning_is_a_column() -> None:
    assert columns_of(Example) == (
        Column("name", "string", "", "a name"),
        Column("seconds", "Float64", "s", "a time"),
        Column("kind", "string", "", "a kind"),
        Column("count", "Int64", "", "a number"),
        Column("flag", "boolean", "", "a flag"),
        Column("options", "mapping", "", "options"),
    )


def test_a_link_s_keys_are_columns_of_links_and_but_for_its_ends_of_collectives() -> None:
    keys = set(get_type_hints(LinkRow))
    assert keys <= set(LINKS.names) and keys - {"source", "target", "link"} <= set(COLLECTIVES.names)
