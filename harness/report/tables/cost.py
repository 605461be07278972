"""Tables on what a step computes and what its communication costs, as rows of text."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.report.labels import shown_devices, shown_strategy, with_settings
from harness.report.tables.text import Heading, Line, TextTable, percent


def compute_table(cells: pd.DataFrame) -> TextTable:
    """Model FLOP/s of one device of each cell, against what the device can do."""
    columns = (
        Heading("setting"),
        Heading("strategy"),
        Heading("devices", True),
        Heading("GFLOP/s a device", True),
        Heading("of a matrix product there", True),
        Heading("MFU", True),
    )
    told = cells[cells["achieved_flops_per_s"].notna() | cells["flops_reason"].notna()]
    rows = [
        Line((name, shown_strategy(row), shown_devices(row), *_arithmetic(row))) for row, name in with_settings(told)
    ]
    return TextTable(columns, tuple(rows))


def _arithmetic(row: Any) -> tuple[str, str, str]:
    if pd.isna(row["achieved_flops_per_s"]):
        return "-", "-", f"not counted: {row['flops_reason']}"
    mfu = "no published peak" if pd.isna(row["mfu"]) else percent(row["mfu"])
    return f"{row['achieved_flops_per_s'] / 1e9:,.3g}", percent(row["of_measured_peak"]), mfu


def waterfall_table(waterfall: pd.DataFrame, most: int = 1000) -> TextTable:
    """The efficiency loss of each cell on several devices, part by part; the shares of a cell add up to 100 %.

    Not more parts than ``most``: the whole table is on disk.
    """
    left_out, waterfall = waterfall[most:], waterfall[:most]
    columns = (
        Heading("cell"),
        Heading("part"),
        Heading("ms of a step", True),
        Heading("share", True),
        Heading("its 95 % interval", True),
        Heading("n", True),
    )
    rows = []
    for row, name in with_settings(waterfall):
        is_first = row["part"] == "ideal"
        cell = f"{shown_strategy(row)} x{shown_devices(row)}, {name}" if is_first else ""
        interval = "one block" if pd.isna(row["low"]) else f"{_share(row['low'])} to {_share(row['high'])} %"
        values = (_ms(row["part_s"]), f"{_share(row['share'])} %", interval, str(row["blocks"]))
        part = "ideal (efficiency)" if is_first else str(row["part"])
        rows.append(Line((cell, part, *values), "base" if is_first else ""))
    if len(left_out):
        rows.append(Line((f"and {len(left_out)} more, in tables/waterfall.csv", "", "", "", "", "")))
    return TextTable(columns, tuple(rows))


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


def unexplained_table(trials: pd.DataFrame) -> TextTable:
    """Return the cells whose efficiency loss could not be explained, each with the reason."""
    bad = trials[trials["explain_error"].notna() & (trials["outcome"] == "ok")].drop_duplicates("cell_id")
    rows = [
        Line((f"{row['strategy']} x{row['devices']}, {name}", str(row["explain_error"])))
        for row, name in with_settings(bad)
    ]
    return TextTable((Heading("cell"), Heading("reason")), tuple(rows))


def communication_table(waterfall: pd.DataFrame, trials: pd.DataFrame) -> TextTable:
    """ddp's exposed communication by taking it away, beside what DDP's own clocks say."""
    columns = (
        Heading("setting"),
        Heading("devices", True),
        Heading("exposed, by taking it away (ms)", True),
        Heading("DDP's own: exposed (ms)", True),
        Heading("DDP's own: first bucket to last (ms)", True),
    )
    exposed = waterfall[waterfall["part"] == "exposed communication"]
    told = trials.groupby("cell_id")[["ddp_exposed_s", "ddp_communication_s"]].mean()
    rows = []
    for row, name in with_settings(exposed):
        own = told.loc[row["cell_id"]] if row["cell_id"] in told.index else {}
        values = (row["part_s"], own.get("ddp_exposed_s"), own.get("ddp_communication_s"))
        rows.append(Line((name, shown_devices(row), *(_ms(value) for value in values))))
    return TextTable(columns, tuple(rows))


def gpu_table(gpus: pd.DataFrame) -> TextTable:
    """What the GPUs of each cell told of themselves."""
    columns = (
        Heading("setting"),
        Heading("strategy"),
        Heading("devices", True),
        Heading("utilisation", True),
        Heading("power of one (W)", True),
        Heading("clock, of the highest", True),
        Heading("hottest (\N{DEGREE SIGN}C)", True),
        Heading("held down"),
        Heading("samples per joule", True),
        Heading("n", True),
    )
    rows = [
        Line(
            (
                name,
                shown_strategy(row),
                shown_devices(row),
                percent(row["gpu_utilisation"]),
                _number(row["power_w"], ",.0f"),
                percent(row["sm_clock_fraction"]),
                _number(row["temperature_c"], ".0f"),
                "not known" if pd.isna(row["throttled"]) else row["throttled"] or "no",
                _number(row["samples_per_joule"], ",.3g"),
                str(row["blocks"]),
            )
        )
        for row, name in with_settings(gpus)
    ]
    return TextTable(columns, tuple(rows))


def _number(value: Any, form: str) -> str:
    return "-" if pd.isna(value) else format(float(value), form)


def _ms(seconds: Any) -> str:
    return "-" if seconds is None or pd.isna(seconds) else f"{1000 * float(seconds):.2f}"
