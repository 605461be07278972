"""The verdict of a run: statements that follow from its tables by the rules of ``rules.py`` and ``trust.py``."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from harness.analysis.verdict import rules
from harness.analysis.verdict.statement import READ, Statement, Tables
from harness.analysis.verdict.trust import trust
from harness.record.frames import records
from harness.record.schema import VERDICT

__all__ = ["READ", "Statement", "Tables", "statements", "verdict"]


def statements(tables: Tables) -> list[Statement]:
    """Return the statements of the verdict, in the order in which they are read."""
    fastest = rules.fastest(tables)
    chosen = {statement.cell_id for statement in fastest}
    leading = [row for row in records(tables["leaders"]) if row["cell_id"] in chosen]
    return [
        *fastest,
        *rules.training(tables),
        *rules.scaling_limit(tables, leading),
        *rules.largest_loss(tables, leading),
        *rules.data_wait(tables, leading),
        *trust(tables, leading),
        *rules.equivalence(tables),
        *rules.failures(tables),
        *rules.open_questions(tables),
    ]


def verdict(tables: Tables) -> pd.DataFrame:
    """Return the statements of the verdict as a table."""
    return VERDICT.frame(asdict(statement) for statement in statements(tables))
