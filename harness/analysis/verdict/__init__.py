"""The verdict of a run: statements that follow from its tables by the rules of ``rules.py`` and ``trust.py``.

Here: the tables that it is made from, and the statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from harness.analysis.stats import SIGNIFICANCE, look_significance
from harness.record.schema import (
    CELLS,
    CONVERGENCE,
    EQUIVALENCE,
    FINDINGS,
    LEADERS,
    MISSING,
    NOISE,
    PHASES,
    SCALING,
    TRIALS,
    VERSUS,
    WATERFALL,
    Table,
)

READ: Mapping[str, Table] = {
    table.name: table
    for table in (
        *(TRIALS, CELLS, LEADERS, SCALING, WATERFALL, PHASES),
        *(NOISE, EQUIVALENCE, CONVERGENCE, FINDINGS, MISSING, VERSUS),
    )
}
"""The tables that the rules read."""


class TableFailed(Exception):
    """A rule needs a table that failed by an error of the harness. ``name``: that of the table."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Tables:
    """The tables of a run by name; one that is not given is empty, and one that is None raises TableFailed.

    ``look``: how often the run has been looked at, from 1, if the experiment file gives the number of blocks, so that
    blocks can be added; None if a rule does. ``significance``: the p-value up to which a difference is clear.
    """

    given: Mapping[str, pd.DataFrame | None]
    look: int | None = 1
    significance: float = SIGNIFICANCE

    @property
    def next_significance(self) -> float:
        """That of the next look, after further blocks."""
        return look_significance(self.look + 1) if self.look else self.significance

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self.given:
            return READ[name].frame([])
        table = self.given[name]
        if table is None:
            raise TableFailed(name)
        return table


@dataclass(frozen=True)
class Statement:
    """One statement of the verdict: what the table VERDICT documents column by column.

    ``topic`` and ``code`` say which sentence it is; ``cell_id`` and ``others`` what it is about; ``value`` with ``low``
    and ``high`` its number, on ``devices`` devices over ``n`` blocks or seeds; ``p_value`` that of a comparison;
    ``subject`` names a part, an outcome or a check; ``evidence`` is the section of the report that shows the numbers.
    """

    topic: str
    code: str
    evidence: str
    cell_id: str | None = None
    others: tuple[str, ...] = ()
    devices: int | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    n: int | None = None
    subject: str | None = None
    reasons: tuple[str, ...] = ()
