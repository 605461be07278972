"""Short names for rows of a table: only what differs between them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pandas as pd

from harness.plan.comparison import SETTING_AXES
from harness.report.row import Row, Scalar, is_missing, is_true, number, rows_of

BATCH_AXES = ["scaling", "per_device_batch_size", "global_batch_size"]


def spread_options(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the options that differ between rows, one column each; equal ones are left out."""
    if frame.empty or "options" not in frame:
        return pd.DataFrame(index=frame.index)
    rows = [options if isinstance(options, Mapping) else {} for options in frame["options"]]
    columns = {}
    for name in dict.fromkeys(name for options in rows for name in options):
        if len({json.dumps(options[name]) for options in rows if name in options}) > 1:
            values = [options.get(name) for options in rows]
            columns[name] = pd.Series(values, index=frame.index, dtype=object)
    return pd.DataFrame(columns, index=frame.index)


def settings(frame: pd.DataFrame, *, batch: bool = True) -> pd.Series[str]:
    """Return each row's setting: its axes besides strategy and devices, as far as rows differ in them.

    The batch is always named, unless ``batch`` is False.
    """
    parts: list[list[str]] = [[""] * len(frame)]
    for axis in SETTING_AXES:
        if axis in frame and axis not in ("per_device_batch_size", "scaling") and frame[axis].nunique(dropna=False) > 1:
            parts.append([_named(axis, value) for value in frame[axis]])
    if batch:
        parts.append([_batch(row) for row in rows_of(frame[BATCH_AXES])])
    for name, values in spread_options(frame).items():
        parts.append(["" if value is None else f"{name}={value}" for value in values])
    joined = [", ".join(part for part in row if part) for row in zip(*parts, strict=True)]
    return pd.Series(joined, index=frame.index, dtype="str")


def rows_with_setting(frame: pd.DataFrame) -> list[Row]:
    """Return the rows, each with a text ``setting``: what it holds fixed."""
    return rows_of(frame.assign(setting=settings(frame)))


def rate_unit(frame: pd.DataFrame) -> str:
    """Return 'samples/s' or 'tokens/s', the workload's unit."""
    units = [str(unit) for unit in frame["unit"].dropna().unique()] if "unit" in frame else []
    return f"{units[0] if len(units) == 1 else 'samples'}/s"


def shown_strategy(row: Row) -> str:
    """Return the strategy, with what sets its rows apart."""
    tags = [tag for tag in ("emulated", "oversubscribed") if is_true(row.get(tag))]
    return f"{row['strategy']} ({', '.join(tags)})" if tags else str(row["strategy"])


def shown_devices(row: Row) -> str:
    """Return the number of devices, and their ids and the link between them if the file names ids.

    For example '2 (GPU 0,1: NV12)'.
    """
    ids, link, nodes = (row.get(name) for name in ("device_ids", "link", "nodes"))
    on = f" on {nodes} nodes" if not is_missing(nodes) and number(nodes) > 1 else ""
    if is_missing(ids):
        return f"{row['devices']}{on}"
    joined = "" if is_missing(link) else f": {link}"
    return f"{row['devices']} (GPU {ids}{joined})"


def cell_label(row: Row) -> str:
    """Return 'dp (emulated) x2'."""
    return f"{shown_strategy(row)} x{shown_devices(row)}"


def _batch(row: Row) -> str:
    if row["scaling"] == "strong":
        return f"global batch {row['global_batch_size']}"
    return f"batch {row['per_device_batch_size']} per device"


def _named(axis: str, value: Scalar) -> str:
    if axis == "compile":
        return "compiled" if value is True else "eager"
    return "" if is_missing(value) else str(value)
