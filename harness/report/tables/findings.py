"""The doctor's findings as rows and lines of text, for the terminal and the report alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.report.labels import shown_strategy
from harness.report.tables.text import Heading, Line, TextTable, plural

SEVERITIES = ("error", "warning", "note")
SAID = ["check", "severity", "means", "advice"]


def findings_table(findings: pd.DataFrame) -> TextTable:
    """Errors first; what several cells share stands once."""
    columns = tuple(Heading(title) for title in ("severity", "check", "where", "seen", "what it means", "what to do"))
    rows = []
    for group in group_findings(findings):
        first = group.iloc[0]
        cells = (
            first["severity"],
            first["check"],
            finding_location(group),
            seen_text(group),
            first["means"],
            first["advice"],
        )
        rows.append(Line(tuple(map(str, cells)), "base" if first["severity"] == "error" else ""))
    return TextTable(columns, tuple(rows))


def group_findings(findings: pd.DataFrame) -> list[pd.DataFrame]:
    """Findings that say the same of several cells, together; errors first."""
    groups = [group for _, group in findings.groupby(SAID, sort=False)]
    return sorted(groups, key=lambda group: SEVERITIES.index(group["severity"].iloc[0]))


def seen_text(rows: pd.DataFrame) -> str:
    """What was seen, each different thing once."""
    return "; ".join(dict.fromkeys(map(str, rows["seen"])))


def finding_location(rows: pd.DataFrame) -> str:
    """``ddp x2 resnet8, dp x2 resnet8``."""
    names = [examined_label(row) for row in rows.to_dict("records")]
    return ", ".join(dict.fromkeys(names))


def examined_label(row: Mapping[Any, Any]) -> str:
    """``ddp x2 resnet8``; what no cell in particular shows is the nodes'."""
    if pd.isna(row["strategy"]):
        return "the nodes"
    model = "" if pd.isna(row["model"]) else f" {row['model']}"
    return f"{shown_strategy(row)} x{row['devices']}{model}"


def summary_line(findings: pd.DataFrame, examined: int) -> str:
    """One line on all of it."""
    kinds = [str(group["severity"].iloc[0]) for group in group_findings(findings)]
    told = [plural(kinds.count(kind), kind) for kind in SEVERITIES if kind in kinds]
    return f"{plural(examined, 'cell')} examined: {', '.join(told) if told else 'nothing found'}."
