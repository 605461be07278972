"""Captions of figures: what is drawn, against which base, and which marks mean what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from harness.analysis.stats import LEAST_BLOCKS
from harness.report.figures.drawing import MOST_FACETS, Facet
from harness.report.figures.scales import Limits
from harness.report.row import NOT_EQUIVALENT, plural, rate_unit, rows_of
from harness.report.tables.text import first_of, span


def in_table(all_facets: Sequence[Facet], drawn: Sequence[Facet], why: str = ", as a single point") -> str:
    """Return a sentence on the settings that the table alone has, since a panel would hold a single point."""
    names = {name for name, _ in drawn}
    alone = [name for name, _ in all_facets if name not in names]
    return f" In the table alone{why}: {first_of(alone, 3)}." if alone else ""


def scales(limits: Sequence[Limits]) -> str:
    """Return a sentence if panels have different scales."""
    return " Scales differ between panels." if len({*limits}) > 1 else ""


def cut(facets: Sequence[object]) -> str:
    return f" The first {MOST_FACETS} settings are drawn; tables/ has all." if len(facets) == MOST_FACETS else ""


def set_apart(rows: pd.DataFrame) -> str:
    """Return a sentence on the marks of rows that are no claim about speed, and one on fp16."""
    meanings = {
        "emulated": "DataParallel on CPU slots is emulated",
        "emulated_compute": "layers wait instead of computing",
        "oversubscribed": "oversubscribed ranks share a device",
        "faulty": "faulty cells have an error of the doctor",
        "ingest": "cells of the ingest alone do not train",
    }
    found = [name for name in meanings if name in rows and rows[name].fillna(False).any()]
    words = [meanings[name] for name in found if name != "emulated" or "emulated_compute" not in found]
    marked = f" Hollow, dotted, pale or starred: {' and '.join(words)}; not a claim about speed." if words else ""
    scaled = rows["precision"].eq("fp16").fillna(False).any()
    return marked + (" A step in fp16 includes the host's read of whether a gradient overflowed." if scaled else "")


def bases(rows: pd.DataFrame) -> str:
    unique = rows.drop_duplicates("base_id")
    names = {f"{row.base_strategy} on {plural(row.base_devices, 'device')}" for row in rows_of(unique)}
    speeds = span("{:,.0f}".format, unique["base_throughput_per_s"])
    return f"Base: {names.pop() if len(names) == 1 else 'as in the table'}, {speeds} {rate_unit(rows)}."


def no_interval(rows: pd.DataFrame) -> str:
    return f" (none below {LEAST_BLOCKS} blocks)" if (rows["blocks"] < LEAST_BLOCKS).any() else ""


def count(rows: pd.DataFrame) -> str:
    """Return 'n = 3 blocks' or 'n = 2 to 3 blocks'."""
    counts = span("{:.0f}".format, rows["blocks"])
    return f"n = {counts} {'block' if counts == '1' else 'blocks'}"


def cells(rows: pd.DataFrame) -> str:
    """Return the cells, each once: 'ddp on 2, fsdp on 2'."""
    return ", ".join(dict.fromkeys(f"{row.strategy} on {row.devices}" for row in rows_of(rows)))


def noise(noise: pd.DataFrame) -> str:
    if noise["low"].notna().any():
        return " Grey band: the A/A test, a base against its twin in other processes."
    return ""


def excluded(rows: pd.DataFrame) -> str:
    """Return the sentences on rows that are not equivalent to one device, or of which that is not known."""
    return hatch_note(rows.loc[rows["equivalence"].eq(NOT_EQUIVALENT), "cell_id"], rows) + unverified(rows)


def unverified(rows: pd.DataFrame) -> str:
    """Return a sentence that names the cells whose equivalence to one device is unknown."""
    names = cells(rows[rows["equivalence"].eq("unknown").fillna(False)])
    return f" Equivalence to one device unknown: {names}." if names else ""


def hatch_note(ids: Iterable[str], rows: pd.DataFrame) -> str:
    """Explain hatching if a drawn row is one of these cells, which are not equivalent to one device."""
    return " Hatched: not equivalent to one device." if rows["cell_id"].isin(ids).any() else ""


def unsteady(rows: pd.DataFrame) -> str:
    """Return a sentence that names the cells whose steps were not steady."""
    names = cells(rows[[any(doubt.name == "no steady state" for doubt in doubts) for doubts in rows["unusual"]]])
    return f" Some trials were not steady when they were timed: {names}." if names else ""


def left_out(count: int) -> str:
    why = "they were measured on other hardware or in another environment"
    return f" {count} cells have no ratio: {why}." if count else ""
