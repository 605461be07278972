"""Rows of a table as plain values, and the labels of cells that the analysis has made."""

from __future__ import annotations

from typing import TypeAlias

import pandas as pd

from harness.analysis.common import Row as Row
from harness.analysis.common import rows_of as rows_of
from harness.plan.labels import SEPARATOR, batch_text, devices_text, joined, strategy_text

Scalar: TypeAlias = str | float | None
"""A value of a table: text, number (an int or a bool is a float to a type checker), or None if it is missing."""
NOT_EQUIVALENT = "not equivalent"
"""The verdict of a check whose training differs from one device's."""


def is_missing(value: Scalar) -> bool:
    return value is None or bool(pd.isna(value))


def is_true(value: Scalar) -> bool:
    """Return whether a flag is set; a missing flag is not."""
    return not is_missing(value) and bool(value)


def words(value: Scalar) -> str:
    """Return text, empty if the value is missing."""
    return "" if is_missing(value) else str(value)


def number(value: Scalar) -> float:
    """Return a number of a row; NaN if it is missing. Raises TypeError if it is text."""
    if isinstance(value, str):
        raise TypeError(f"got the text {value!r}; expected a number")
    return float("nan") if value is None or pd.isna(value) else float(value)


def texts(value: Scalar) -> list[str]:
    """Return a list of a row as texts; without any if it is missing."""
    return [str(one) for one in value] if isinstance(value, tuple) else []


def is_unverified(row: Row) -> bool:
    """Return whether the check whether the row's cells train as one device does has no verdict."""
    return row.get("equivalence") == "unknown"


def is_not_equivalent(row: Row) -> bool:
    """Return whether the row's cells do not train as one device does."""
    return row.get("equivalence") == NOT_EQUIVALENT


def why_excluded(row: Row) -> str:
    """Return in two words why the row has no ratio."""
    return "" if is_missing(row.excluded) else str(row.excluded).partition(":")[0]


def settings(frame: pd.DataFrame, *, batch: bool = True, own: bool = False) -> pd.Series[str]:
    """Return each row's setting: what varies in the run besides strategy and devices.

    ``batch``: whether it names the batch, ``own``: whether it names the options that only its strategy can have.
    """
    texts = [
        joined(words(row.get("setting")) if batch else setting_without_batch(row), own_options(row) if own else "")
        for row in rows_of(frame)
    ]
    return pd.Series(texts, index=frame.index, dtype="str")


def rate_unit(frame: pd.DataFrame) -> str:
    """Return 'samples/s' or 'tokens/s', the workload's unit."""
    units = [str(unit) for unit in frame["unit"].dropna().unique()] if "unit" in frame else []
    return f"{units[0] if len(units) == 1 else 'samples'}/s"


def shown_strategy(row: Row) -> str:
    """Return the strategy, with what sets its rows apart and with its own options that vary in the run."""
    return joined(strategy_text(row), own_options(row))


def plain_label(row: Row) -> str:
    """Return a cell in words that need no key: 'ddp on 2 devices · batch 64/device · resnet14 · bucket_cap_mb=25'.

    It always names strategy, devices and per-device batch, then what varies in the run.
    """
    placed = f"{strategy_text(row)} {on_devices(row)}"
    return joined(placed, batch_words(row), setting_without_batch(row), own_options(row))


def on_devices(row: Row) -> str:
    """Return 'on 2 devices', 'on 16 devices of 2 nodes' or 'on 2 devices (GPU 0,1: NV12)'."""
    ids, link, nodes = (row.get(name) for name in ("device_ids", "link", "nodes"))
    placed = f"on {plural(row.devices, 'device')}"
    if ids:
        return f"{placed} (GPU {ids}{f': {link}' if link else ''})"
    return f"{placed} of {nodes} nodes" if nodes not in (None, 1) else placed


def batch_words(row: Row) -> str:
    """Return 'batch 64/device', of one device 'batch 64', and with a fixed global batch that too.

    Devices of an uneven training have no common batch: 'global batch 100'.
    """
    if is_missing(row.per_device_batch_size):
        return f"global batch {row.global_batch_size}"
    batch = f"batch {row.per_device_batch_size}" + "/device" * (row.devices != 1)
    is_global = row.scaling == "strong" and row.devices != 1
    return f"{batch} (global batch {row.global_batch_size})" if is_global else batch


def cell_label(row: Row) -> str:
    """Return 'dp (emulated) x2', with the strategy's own options that vary in the run: the setting is left out."""
    return joined(f"{strategy_text(row)} x{devices_text(row)}", own_options(row))


def own_options(row: Row) -> str:
    """Return the options of its strategy alone that vary in the run, 'bucket_cap_mb=25'; empty if there are none."""
    return words(row.get("own_options"))


def check_label(row: Row) -> str:
    """Return the label of an equivalence check, whose batch is its own: 'ddp x2 · resnet8'."""
    return joined(cell_label(row), setting_without_batch(row))


def setting_without_batch(row: Row) -> str:
    """Return what varies in the run besides strategy, devices and batch; empty if nothing does."""
    return setting_without(row, batch_text(row))


def setting_without(row: Row, text: str) -> str:
    """Return the row's setting without one part of it."""
    return SEPARATOR.join(part for part in words(row.get("setting")).split(SEPARATOR) if part != text)


def plural(count: int, noun: str) -> str:
    """Return '1 block' or '2 blocks'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
