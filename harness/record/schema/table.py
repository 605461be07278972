"""A table and its columns, each with name, type, unit and meaning."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.extensions import ExtensionArray, ExtensionDtype
from pandas.api.typing import NAType
from pandas.arrays import FloatingArray

from harness.config.axes import TrialAxes, declared
from harness.plan.comparison import options_text
from harness.plan.rows import RecordedTrial

DType = Literal["string", "Int64", "Float64", "boolean", "list", "mapping"]
"""pandas' types, and lists (tuples) and mappings, which pandas holds as objects and files hold as text."""


@dataclass(frozen=True)
class Column:
    """One column of a table. ``unit`` is empty for texts, flags and numbers without one."""

    dtype: DType
    name: str
    meaning: str
    unit: str = ""


class Table:
    """A table: its name, the meaning of one row, and its columns in order."""

    def __init__(self, name: str, row: str, *columns: Column) -> None:
        self.name, self.row, self.columns = name, row, columns

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def dtypes(self) -> dict[str, DType]:
        """The type of each column by its name."""
        return {column.name: column.dtype for column in self.columns}

    def frame(self, rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
        """Return a typed frame of these rows, with <NA> for missing values; columns unknown to the table come last."""
        return self.typed(pd.DataFrame([*rows]))

    def typed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with every column of the table, in its order and type; further columns come last."""
        given = {str(name): column for name, column in frame.items()}
        columns = {column.name: _typed(given.pop(column.name, None), column, frame.index) for column in self.columns}
        # no copy: millions of steps are held in memory once; pandas copies on write
        return pd.DataFrame({**columns, **given}, index=frame.index, copy=False)

    def as_text(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with lists and mappings as text: 'first; second', and JSON; an empty list is missing."""
        texts = {
            column.name: frame[column.name].map(_TEXTS[column.dtype], na_action="ignore").astype("string")
            for column in self.columns
            if column.dtype in _TEXTS
        }
        return frame.assign(**texts)


_TEXTS: Mapping[str, Callable[[Any], str | None]] = {
    "list": lambda values: "; ".join(map(str, values)) or None,
    "mapping": options_text,
}


def floats(values: Iterable[float | NAType | None]) -> FloatingArray:
    """Return a Float64 column in which None and <NA> are missing; a number that is not finite keeps its value.

    pandas takes NaN for a missing value wherever it converts plain numbers.
    """
    known = [None if value is None or isinstance(value, NAType) else float(value) for value in values]
    missing = np.array([value is None for value in known], dtype=bool)
    return FloatingArray(np.array([0.0 if value is None else value for value in known], dtype=np.float64), missing)


def _typed(
    given: pd.Series[Any] | None, column: Column, index: pd.Index[Any]
) -> pd.Series[Any] | ExtensionArray | npt.NDArray[np.object_]:
    """Return a column in its type, None if the frame lacks it; a missing list is the empty one, a mapping None."""
    if column.dtype == "list" or column.dtype == "mapping":
        empty = () if column.dtype == "list" else None
        values = [None] * len(index) if given is None else given.array
        kept = (value if isinstance(value, Mapping | tuple) else empty for value in values)
        return np.fromiter(kept, dtype=object, count=len(values))
    dtype = _DTYPES[column.dtype]
    if given is None:
        return _MISSING[column.dtype].take(np.zeros(len(index), dtype=np.intp))  # ten times as fast as a new one
    return given if given.dtype == dtype else given.array.astype(dtype)


_DTYPES: Mapping[DType, ExtensionDtype] = {
    "string": pd.StringDtype(),
    "Int64": pd.Int64Dtype(),
    "Float64": pd.Float64Dtype(),
    "boolean": pd.BooleanDtype(),
}
_MISSING: Mapping[DType, ExtensionArray] = {
    name: pd.Series(pd.NA, index=[0], dtype=dtype).array for name, dtype in _DTYPES.items()
}


_KINDS: Mapping[object, DType] = {str: "string", int: "Int64", float: "Float64", bool: "boolean"}


def columns_of(row: type) -> tuple[Column, ...]:
    """Return the columns that a type of rows declares: its fields with a ``Meaning``, in order."""
    return tuple(
        Column(_dtype(kind), name, meaning.text, meaning.unit) for name, (kind, meaning) in declared(row).items()
    )


def _dtype(kind: object) -> DType:
    """Return the column type of an annotation such as ``float | None`` or a Literal of texts; raises KeyError."""
    if get_origin(kind) in (UnionType, Union):
        kind = next(each for each in get_args(kind) if each is not NoneType)  # unions are of one column type
    if get_origin(kind) is collections.abc.Mapping:
        return "mapping"
    return "string" if get_origin(kind) is Literal else _KINDS[kind]


def by_name(*rows: type) -> dict[str, Column]:
    """Return the columns that these types declare, by name."""
    return {column.name: column for row in rows for column in columns_of(row)}


string, integer, real = partial(Column, "string"), partial(Column, "Int64"), partial(Column, "Float64")
flag, texts, mapping = partial(Column, "boolean"), partial(Column, "list"), partial(Column, "mapping")


UNIT = by_name(RecordedTrial)["unit"]
P_VALUE = real("p_value", "two-sided t test of the mean log ratio, not adjusted; `<NA>` below 3 blocks")
PRECISE = flag(
    "precise",
    "true if the interval meets throughput.blocks.halfwidth; `<NA>` without a rule, and for the throughput of a cell "
    "whose blocks follow from its ratios",
)
PAIRED_THROUGHPUT = real("throughput_per_s", "throughput, geometric mean over the paired blocks", "samples/s")


def ends(name: str = "", unit: str = "") -> tuple[Column, ...]:
    """Return the columns of the interval and of the range over blocks, of the row's one value or of ``name``."""
    prefix, of, of_block = (f"{name}_", f" of the {name}", name) if name else ("", "", "value")
    interval = f"of the 95 % confidence interval{of} over blocks; `<NA>` below 3 blocks"
    return (
        real(f"{prefix}low", f"lower end {interval}", unit),
        real(f"{prefix}high", f"upper end {interval}", unit),
        real(f"{prefix}least", f"smallest {of_block} of a block", unit),
        real(f"{prefix}most", f"largest {of_block} of a block", unit),
    )


INTERVAL = (integer("blocks", "number of blocks in the estimate (n)"), *ends())


def paired(other_throughput: str, other: str, ratio: str) -> tuple[Column, ...]:
    """Return the columns of a ratio of two cells: their throughputs, the ratio and its interval."""
    return (
        UNIT,
        PAIRED_THROUGHPUT,
        real(other_throughput, f"throughput of {other}, geometric mean over blocks", "samples/s"),
        real("ratio", f"{ratio}, geometric mean over blocks"),
        *INTERVAL,
        flag("excludes_one", "true if the interval does not contain 1; of equal cells 1 in 20 by chance"),
        P_VALUE,
        PRECISE,
    )


CELL_ID = by_name(RecordedTrial)["cell_id"]
AXIS_COLUMNS = columns_of(TrialAxes)
LABEL_COLUMNS = (
    string("label", "label of the cell: strategy, devices, and the axes and options that vary in the run"),
    string("setting", "part of the label that cells of several strategies can share; empty if nothing varies"),
    string("own_options", "part of the label that only cells of its strategy can have; empty if nothing varies"),
)
CELL_COLUMNS = (*LABEL_COLUMNS, *AXIS_COLUMNS)
