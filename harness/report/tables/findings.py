"""Text table and lines of the doctor's findings, for the terminal and the report."""

from __future__ import annotations

import pandas as pd

from harness.report.row import Row, is_missing, rows_of
from harness.report.tables.text import Column, TextTable, make_table, plural, words

SEVERITIES = ("error", "warning", "note")
SAID = ["check", "severity", "means", "advice"]


def findings_table(findings: pd.DataFrame) -> TextTable:
    """Return the findings, errors first; one that several cells share is one row."""
    columns: tuple[Column, ...] = (
        ("severity", "severity", words),
        ("check", "check", words),
        ("where", "where", words),
        ("place", "place", words),
        ("observed", "seen", words),
        ("meaning", "means", words),
        ("action", "advice", words),
    )
    rows = [
        {
            **rows_of(group[:1])[0],
            "where": finding_location(group),
            "place": places_text(group),
            "seen": seen_text(group),
        }
        for group in group_findings(findings)
    ]
    return make_table(columns, rows, lambda row: "base" if row["severity"] == "error" else "")


def group_findings(findings: pd.DataFrame) -> list[pd.DataFrame]:
    """Group equal findings of several cells; errors first."""
    groups = [group for _, group in findings.groupby(SAID, sort=False)]
    return sorted(groups, key=lambda group: SEVERITIES.index(group["severity"].iloc[0]))


def seen_text(rows: pd.DataFrame) -> str:
    """Return what was observed, each observation once."""
    return "; ".join(dict.fromkeys(map(str, rows["seen"])))


def places_text(rows: pd.DataFrame) -> str:
    """Return the places in the user's code, each once; empty if there is none."""
    return ", ".join(dict.fromkeys(rows["place"].dropna()))


def finding_location(rows: pd.DataFrame) -> str:
    """Return 'ddp x2 · resnet8, dp x2 · resnet8'."""
    names = [examined_label(row) for row in rows_of(rows)]
    return ", ".join(dict.fromkeys(names))


def examined_label(row: Row) -> str:
    """Return the label of an examined cell, or 'the nodes' for a finding of no cell in particular."""
    if is_missing(row["strategy"]):
        return "the nodes"
    return str(row["label"])


def summary_line(findings: pd.DataFrame, examined: int) -> str:
    """Return a line with the number of findings by severity."""
    kinds = [str(group["severity"].iloc[0]) for group in group_findings(findings)]
    found = [plural(kinds.count(kind), kind) for kind in SEVERITIES if kind in kinds]
    return f"{plural(examined, 'cell')} examined: {', '.join(found) if found else 'nothing found'}."
