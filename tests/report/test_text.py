"""Text tables: columns that go, and the numbers by which rows sort."""

from __future__ import annotations

from harness.report.tables.text import Line, TextTable, decimal, flush_right, make_table, words

COLUMNS = (
    ("cell", "cell", words),
    ("speed", lambda row: f"{row['speed']} (1 to 9)", flush_right),
    ("share", "share", decimal("{:.0f} %", 100)),
    ("n", "n", flush_right),
    ("note", "note", words),
)
ROWS = [
    {"cell": name, "speed": speed, "share": share, "n": 3, "note": None}
    for name, speed, share in (("a", 10.0, None), ("b", 9.5, 0.5), ("c", float("inf"), 0.25))
]


def titles(table: TextTable) -> list[str]:
    return [heading.title for heading in table.columns]


def test_columns_that_no_row_fills_go() -> None:
    assert titles(make_table(COLUMNS, ROWS)) == ["cell", "speed", "share", "n"]
    assert titles(make_table(COLUMNS, ROWS[:1])) == ["cell", "speed", "n"]
    assert titles(make_table(COLUMNS, [])) == ["cell", "speed", "share", "n", "note"]


def test_columns_that_are_the_same_in_every_row_stand_above() -> None:
    table = make_table(COLUMNS, ROWS, rest="and 2 more").without_constants()
    assert titles(table) == ["cell", "speed", "share"] and table.common == (("n", "3"),)
    assert [line.cells for line in table.lines] == [
        ("a", "10.0 (1 to 9)", "-"),
        ("b", "9.5 (1 to 9)", "50 %"),
        ("c", "inf (1 to 9)", "25 %"),
    ]
    assert table.rows[-1] == Line(("and 2 more", "", ""), "rest") and table.rest == "and 2 more"


def test_a_single_row_and_an_ordered_table_keep_their_columns() -> None:
    assert titles(make_table(COLUMNS, ROWS[1:2]).without_constants()) == ["cell", "speed", "share", "n"]
    assert titles(make_table(COLUMNS, ROWS, ordered=True).without_constants()) == ["cell", "speed", "share", "n"]


def test_rows_sort_by_numbers_not_by_their_text() -> None:
    table = make_table(COLUMNS, ROWS, keys={"speed": "speed"})
    assert [line.numbers for line in table.lines] == [
        (None, 10.0, None, 3.0),
        (None, 9.5, 0.5, 3.0),
        (None, None, 0.25, 3.0),  # infinite: after the others
    ]
    assert [*table.lines[1].values] == [("b", ""), ("9.5 (1 to 9)", "9.5"), ("50 %", "0.5"), ("3", "3")]


def test_tables_of_two_rows_and_ordered_ones_do_not_sort() -> None:
    assert make_table(COLUMNS, ROWS).is_sortable
    assert not make_table(COLUMNS, ROWS[:2], rest="and 2 more").is_sortable
    assert not make_table(COLUMNS, ROWS, ordered=True).is_sortable
