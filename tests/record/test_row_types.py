"""The row types of plan/rows.py have the columns of the schema, with the same types."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from harness.plan.rows import FindingRow, LinkRow, RankRow, RecordedTrial, TrialFacts, WindowRow
from harness.record.schema import COLLECTIVES, FINDINGS, LINKS, RANKS, TRIAL_COLUMNS, TRIALS, WINDOWS, Table

NESTED = {"facts", "parts", "ranks", "windows", "links", "exchanges", "findings", "figures", "memory", "estimates"}
"""Keys of a recorded line, or of its facts, that are no columns of these tables."""
COMPUTED = {
    "label",
    "setting",
    "own_options",
    "device_model",
    "threads",
    "throughput_per_s",
    "step_s",
    "wait_fraction",
    "peak_memory_bytes",
    "build_peak_bytes",
    "timed_steps",
    "warmup_steps",
    "doubts",
}
"""Columns of a trial that the analysis computes from its axes, windows, steps and ranks."""
DTYPES = {str: {"string"}, int: {"Int64", "Float64"}, float: {"Float64"}, bool: {"boolean"}, Mapping: {"mapping"}}
OF_THE_TRIAL = {column.name for column in TRIAL_COLUMNS}


def fields_of(*types: type) -> dict[str, Any]:
    return {name: kind for one in types for name, kind in get_type_hints(one).items()}


def plain_type(annotation: Any) -> type:
    """Return the type in an annotation such as ``float | None`` or ``NotRequired[str]``; str for a Literal of texts."""
    if get_origin(annotation) is Mapping:
        return Mapping
    if get_origin(annotation) is Literal:
        return str
    arguments = [kind for kind in get_args(annotation) if kind is not NoneType]
    return plain_type(arguments[0]) if arguments else annotation


CASES = [
    pytest.param(TRIALS, (RecordedTrial, TrialFacts), COMPUTED, id="trials"),
    pytest.param(WINDOWS, (WindowRow,), OF_THE_TRIAL, id="windows"),
    pytest.param(RANKS, (RankRow,), OF_THE_TRIAL, id="ranks"),
]


@pytest.mark.parametrize(("table", "types", "elsewhere"), CASES)
def test_every_recorded_column_is_in_the_types_and_in_the_schema(
    table: Table, types: tuple[type, ...], elsewhere: set[str]
) -> None:
    assert set(fields_of(*types)) - NESTED == set(table.names) - elsewhere


@pytest.mark.parametrize(("table", "types", "elsewhere"), CASES)
def test_a_column_has_one_type_in_both(table: Table, types: tuple[type, ...], elsewhere: set[str]) -> None:
    dtypes = {column.name: column.dtype for column in table.columns}
    fields = {name: plain_type(kind) for name, kind in fields_of(*types).items() if name not in NESTED}
    assert {name: dtypes[name] for name, kind in fields.items() if dtypes[name] not in DTYPES[kind]} == {}


def test_a_finding_s_keys_are_columns_of_the_findings() -> None:
    assert set(fields_of(FindingRow)) <= set(FINDINGS.names)


def test_a_link_s_keys_are_columns_of_links_and_but_for_its_ends_of_collectives() -> None:
    assert set(fields_of(LinkRow)) <= set(LINKS.names)
    assert set(fields_of(LinkRow)) - {"source", "target", "link"} <= set(COLLECTIVES.names)
