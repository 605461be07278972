"""The columns that types of rows declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, get_type_hints

from typing_extensions import TypedDict

from harness.plan.rows import LinkRow, Meaning
from harness.record.schema import COLLECTIVES, LINKS
from harness.record.schema.table import Column, columns_of


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
