"""A run at a glance, for a notebook: options as columns, a short table of efficiency, the text that shows a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from harness.analysis.common import Row
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import option_value
from harness.record.frames import records

if TYPE_CHECKING:
    from harness.analysis.results import Results

NO_RATIO = "-"


def option_columns(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the options in which the measured cells differ, one column each, by cell_id; <NA> if a cell has none.

    ``trials``: the table of that name. An option of a strategy is compared among the cells of that strategy.
    """
    measured = trials[trials["kind"] != "diagnostic"].drop_duplicates("cell_id")
    cells = records(measured[["cell_id", "strategy", "options"]])
    known = [name for cell in cells for name in (cell["options"] or {})]
    columns = {}
    for name in sorted(set(known)):
        values = [option_value(cell["options"] or {}, name, cell["strategy"]) for cell in cells]
        if len({json.dumps(value) for cell, value in zip(cells, values, strict=True) if _applies(name, cell)}) > 1:
            columns[name] = _column(values)
    return pd.DataFrame(columns, index=pd.Index([cell["cell_id"] for cell in cells], name="cell_id", dtype="string"))


def _applies(name: str, cell: Row) -> bool:
    """Return whether an option is one of every cell, or of this cell's strategy."""
    section = name.rpartition(".")[0]
    return section == cell["strategy"] or not (section in BUILTIN_TRAITS or ":" in section)


def _column(values: Sequence[object]) -> pd.api.extensions.ExtensionArray:
    """Return values as a column of one type; of several types as their text in a file."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return pd.array([float(value) if isinstance(value, int | float) else None for value in values], dtype="Float64")
    types: tuple[tuple[type, str], ...] = ((bool, "boolean"), (int, "Int64"), (str, "string"))
    for kind, dtype in types:
        if kinds == {kind}:
            typed: pd.api.extensions.ExtensionArray = pd.Series(list(values), dtype=dtype).array
            return typed
    texts = [value if isinstance(value, str) or value is None else json.dumps(value) for value in values]
    return pd.array(texts, dtype="string")


def efficiency_table(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return one row a cell, by its label: devices, speedup and efficiency as text with interval, number of blocks.

    Text, so that nothing is averaged: a mean over cells of unlike device counts, models or batches is the efficiency of
    no training, and a mean of ratios is no ratio of means. Each number is a geometric mean over paired blocks already.
    The table ``scaling`` has the numbers.
    """
    rows = [
        {
            "devices": row["devices"],
            "speedup": _ratio_text(row, "speedup", "", "{:.2f}", 1.0),
            "efficiency": _ratio_text(row, "efficiency", "efficiency_", "{:.0f} %", 100.0),
            "blocks": row["blocks"],
        }
        for row in records(scaling)
    ]
    types = {"devices": "Int64", "speedup": "string", "efficiency": "string", "blocks": "Int64"}
    frame = pd.DataFrame(rows, columns=list(types), index=pd.Index(scaling["label"], name="cell"))
    return frame.astype(types)


def _ratio_text(row: Row, name: str, prefix: str, form: str, factor: float) -> str:
    """Return '75 % (65 to 86 %)', the ends of the interval or, below three blocks, 'blocks 71 to 76 %'."""
    if row["cell_id"] == row["base_id"]:
        return "base"
    if row[name] is None or pd.isna(row[name]):
        return str(row["excluded"]) if not pd.isna(row["excluded"]) else NO_RATIO

    def text(value: float) -> str:
        return form.format(factor * float(value))

    low, high = row[f"{prefix}low"], row[f"{prefix}high"]
    differs = "" if pd.isna(row["excluded"]) else ", not equivalent"
    if not pd.isna(low):
        return f"{text(row[name])} ({text(low).removesuffix(' %')} to {text(high)}){differs}"
    least, most = row[f"{prefix}least"], row[f"{prefix}most"]
    return f"{text(row[name])} (no interval; blocks {text(least).removesuffix(' %')} to {text(most)}){differs}"


def describe(results: Results) -> str:
    """Return what a run is and what its results have, in a few lines; computes no table."""
    lines = {line["trial_id"]: line for line in results.lines}  # the last attempt of each trial
    counts = Counter(str(line["outcome"]) for line in lines.values())
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none finished"
    measured = {line["cell_id"] for line in lines.values() if line["outcome"] == "ok" and line["purpose"] == ""}
    invocations = results.environment.get("invocations", [])
    ended = (invocations[-1].get("ended") or "not ended") if invocations else "not started"
    return (
        f"Results of {results.experiment.name}: {results.folder.path}\n"
        f"  trials: {outcomes}; cells measured: {len(measured)}; last invocation: {ended}\n"
        f"  .efficiency (text, by cell), .options (by cell_id), .plot.throughput() and others\n"
        f"  tables: {', '.join(f'.{name}' for name in results.tables)}"
    )
