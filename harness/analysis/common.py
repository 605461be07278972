"""Shared by the analyses: trials that count and their throughput, bases of cells, cells that match, order of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from harness.analysis.stats import Estimate
from harness.config.axes import BATCHES, CELL_AXES, WORK_AXES, batch_axis
from harness.config.strategy_traits import strategy_order
from harness.config.values import PlainValue
from harness.plan.cell import is_wanted
from harness.plan.comparison import is_own_option, natural, options_of, options_text
from harness.plan.labels import TAGS
from harness.plan.rows import RecordedTrial
from harness.record.frames import records

AnyRow = Mapping[str, Any]
"""A row by column; the schema defines the types of its values."""
Lines = Sequence[RecordedTrial]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Values = dict[str, str | float | bool | None]
"""Part of a row of a derived table."""
KEYS = ["trial_id", "attempt"]
"""The columns that identify a recorded trial."""
TrialKey = tuple[str, int]
"""Their values."""


class Row(dict[str, Any]):
    """A row of a table: its values by column, which are attributes too; None is a missing value.

    The schema defines the columns and their types.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no column {name!r}")


Rows = Sequence[Row]


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a table; <NA> is None."""
    return [Row(row) for row in records(frame)]


def measured(trials: pd.DataFrame, purpose: str = "") -> pd.DataFrame:
    """Return the successful timed trials of a purpose; the last if a cell has several in a block and invocation.

    Trials of ``--inline`` are excluded: a debugger may have stopped them. Without a purpose, the trials that may
    enter a headline: neither twins nor trials that only explain others.
    """
    timed = trials["kind"] == "throughput" if not purpose else trials["purpose"] == purpose
    ok = timed & (trials["outcome"] == "ok") & ~trials["inline"].fillna(False).astype(bool)
    places = ok.to_numpy(dtype=bool, na_value=False).nonzero()[0]
    keys = trials[["cell_id", "block", "invocation"]].iloc[places]
    last: pd.DataFrame = trials.iloc[places[~keys.duplicated(keep="last").to_numpy()]]  # one copy of many columns
    return last


def last_of_blocks(trials: pd.DataFrame) -> pd.DataFrame:
    """Return one measured trial of each cell and block: the last, if several invocations have one."""
    return measured(trials).drop_duplicates(["cell_id", "block"], keep="last")


def throughput(windows: Iterable[AnyRow]) -> float | None:
    """Return all ranks' samples over the slowest rank's time, summed over the timed windows; None without a window.

    Numerator and denominator cover the same steps. All ranks start a window together; the slowest one ends it.
    """
    weight = 0.0
    slowest: dict[int, float] = {}
    for window in windows:
        if window["window_kind"] == "timed":
            weight += window["weight"]
            number = window["window"]
            slowest[number] = max(slowest.get(number, 0.0), window["duration_s"])
    seconds = sum(slowest.values())
    return weight / seconds if seconds > 0 else None


def is_no_claim(row: AnyRow) -> bool:
    """Return whether a row's speed is no claim about training.

    It is emulated, oversubscribed, of an ingest alone, or allowed despite an error of the doctor.
    """
    return bool(claim_tags(row))


def claim_tags(row: AnyRow) -> list[str]:
    """Return the tags that make a row's speed no claim."""
    return [tag for tag in TAGS if not pd.isna(row.get(tag)) and bool(row[tag])]


def no_claims(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return of each row of a frame whether its speed is no claim."""
    flags = {tag: frame[tag].fillna(False).astype(bool) for tag in TAGS if tag in frame}
    return pd.DataFrame(flags, index=frame.index).any(axis=1)


def by_cell(trials: Iterable[Row]) -> dict[str, Rows]:
    """Return the trials of each cell, by block and invocation; cells in their order of appearance."""
    cells = grouped(trials, lambda row: str(row.cell_id))
    return {cell_id: sorted(rows, key=lambda row: (row.block, row.invocation)) for cell_id, rows in cells.items()}


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return rows, or other items, by key, in their order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def trial_key(row: Row) -> TrialKey:
    """Return a row's trial id and attempt."""
    return row.trial_id, row.attempt


def nearest(row: Row, others: Iterable[Row], *, anywhere: bool = False) -> Row | None:
    """Return which of another cell's trials of the same block a trial is compared with: one of the same invocation.

    Without one, as in a block that was cut in two, the last that ran in an equal environment or, with ``anywhere``, in
    any environment.
    """
    known = [*others]
    beside = [other for other in known if other.invocation == row.invocation]
    is_known = not pd.isna(row.environment)
    equal = [other for other in known if anywhere or (is_known and row.environment == other.environment)]
    return next(reversed(beside or equal), None)


def bases_of(cells: Mapping[str, Rows]) -> dict[str, str]:
    """Return the base of each measured cell: the planned one or, if that failed, the smallest of its family."""
    by_size = sorted(cells, key=lambda cell_id: (cells[cell_id][0].devices, cell_id), reverse=True)
    smallest = {cells[cell_id][0].family_id: cell_id for cell_id in by_size}  # which comes last
    return {
        cell_id: str(first.base_id) if first.base_id in cells else smallest[first.family_id]
        for cell_id, (first, *_) in cells.items()
    }


def columns_of(row: Row, *names: str) -> Values:
    """Return some columns of a row."""
    return {name: getattr(row, name) for name in names}


def ends(estimate: Estimate) -> Values:
    return {"blocks": estimate.n, **estimate.around()}


def order(row: AnyRow) -> tuple[object, ...]:
    names = ("model", "data", "precision", "scaling", batch_axis(row["scaling"]))
    fixed = tuple((pd.isna(row[name]), "" if pd.isna(row[name]) else natural(row[name])) for name in names)
    ids: object = "" if pd.isna(row["device_ids"]) else natural(row["device_ids"])
    return (*fixed, strategy_order(row["strategy"]), row["devices"], row["nodes"], ids, options_text(row["options"]))


def axis_value(row: AnyRow, name: str) -> PlainValue:
    """Return a recorded cell's value on an axis or option, as ``Cell.axis`` does; None if it has none."""
    if "." in name:
        return (row["options"] or {}).get(name)
    if name == "device_ids":
        return [int(number) for number in str(row[name]).split(",")] if row[name] is not None else []
    value: PlainValue = row[name]
    return value


def matches(row: AnyRow, wanted: Mapping[str, PlainValue]) -> bool:
    """Return whether a recorded cell has, on every named axis, the wanted value or one of the wanted values."""
    return all(is_wanted(values, axis_value(row, name)) for name, values in wanted.items())


def workload_options(row: AnyRow) -> str:
    """Return a cell's options of the workload as text: cells that differ in them do other work."""
    return options_text({name: value for name, value in options_of(row).items() if name.startswith("workload.")})


def work_of(row: Row, *axes: str) -> tuple[object, ...]:
    """Return what rows have in common that train the same: model, data and the like, and the values of ``axes``."""
    return (*columns_of(row, *WORK_AXES, *axes).values(), workload_options(row))


def content_key(row: AnyRow, by: Iterable[str] = ()) -> str:
    """Return what cells have in common that agree in all axes and options but those of ``by``.

    The batch that is held fixed counts, not the one that follows from it and the devices. With the strategy its own
    options are left out too.
    """
    return json.dumps(_content(row, frozenset(by)), sort_keys=True, default=str)


def differing_axes(row: AnyRow, other: AnyRow) -> list[str]:
    """Return the axes and options in which two cells differ, by name."""
    mine, others = _content(row, frozenset()), _content(other, frozenset())
    return [name for name in {**mine, **others} if mine.get(name) != others.get(name)]


def _content(row: AnyRow, by: frozenset[str]) -> dict[str, object]:
    following = {*BATCHES} if by & {*BATCHES} else {*BATCHES} - {batch_axis(row["scaling"])}
    without = {*by, "options", "emulated", "emulated_compute", *following}
    options: Mapping[str, PlainValue] = row["options"] or {}
    own = {name for name in options if is_own_option(row, name)} if "strategy" in by else set()
    return {
        **{name: row[name] for name in CELL_AXES if name not in without},
        **{name: value for name, value in options.items() if name not in by | own},
    }
