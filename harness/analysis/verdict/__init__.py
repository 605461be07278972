"""The verdict of a run: statements that follow from its tables by the rules of ``rules.py`` and ``trust.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import pandas as pd

from harness.analysis.common import Record, rows_of
from harness.analysis.verdict import rules
from harness.analysis.verdict.choices import choices
from harness.analysis.verdict.rules import causes
from harness.analysis.verdict.statement import READ, Statement, TableFailed, Tables
from harness.analysis.verdict.trust import trust
from harness.record.schema import VERDICT

__all__ = ["READ", "Statement", "Tables", "statements", "verdict"]


def statements(tables: Tables) -> list[Statement]:
    """Return the statements of the verdict, in the order in which they are read.

    A table that failed costs the statements that need it; the last statement names such tables.
    """
    failed: dict[str, None] = {}

    def follow(rule: Callable[..., Iterable[Statement]], *leading: Sequence[Record]) -> list[Statement]:
        try:
            return [*rule(tables, *leading)]
        except TableFailed as error:
            failed[error.name] = None
            return []

    fastest = follow(rules.fastest)
    chosen = {statement.cell_id for statement in fastest}
    leading = [row for row in rows_of(tables["leaders"]) if row.cell_id in chosen] if chosen else []
    found = [
        *follow(rules.incomplete),
        *fastest,
        *follow(rules.fewer_devices),
        *follow(choices, leading),
        *follow(rules.training),
    ]
    for of_leading in (rules.scaling_limit, causes, trust):
        found += follow(of_leading, leading)
    for of_run in (rules.equivalence, rules.failures, rules.open_questions):
        found += follow(of_run)
    return [*found, *([Statement("failed", "tables", "", n=len(failed), reasons=tuple(failed))] if failed else [])]


def verdict(tables: Tables) -> pd.DataFrame:
    """Return the statements of the verdict as a table."""
    return VERDICT.frame(asdict(statement) for statement in statements(tables))
