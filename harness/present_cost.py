"""Tables on what a step computes and what its communication costs, as rows of text."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.labels import settings, shown_devices, shown_strategy
from harness.present import Heading, Line, TextTable, percent


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
    known = cells[cells["achieved_flops_per_s"].notna()]
    rows = [
        Line(
            (
                name,
                shown_strategy(row),
                shown_devices(row),
                f"{row['achieved_flops_per_s'] / 1e9:,.3g}",
                percent(row["of_measured_peak"]),
                "no published peak" if pd.isna(row["mfu"]) else percent(row["mfu"]),
            )
        )
        for name, row in zip(settings(known), known.to_dict("records"), strict=True)
    ]
    return TextTable(columns, tuple(rows))


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
    for name, row in zip(settings(exposed), exposed.to_dict("records"), strict=True):
        own = told.loc[row["cell_id"]] if row["cell_id"] in told.index else {}
        values = (row["part_s"], own.get("ddp_exposed_s"), own.get("ddp_communication_s"))
        rows.append(Line((name, shown_devices(row), *(_ms(value) for value in values))))
    return TextTable(columns, tuple(rows))


def _ms(seconds: Any) -> str:
    return "-" if seconds is None or pd.isna(seconds) else f"{1000 * float(seconds):.2f}"
