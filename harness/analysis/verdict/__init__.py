"""The verdict of a run: statements that follow from its tables by the rules of ``rules.py``.

Here: the tables that the rules read, and the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.analysis.common import Row
from harness.analysis.stats import SIGNIFICANCE, look_significance

NUMBERS: Mapping[str, tuple[str, str, str]] = {
    **dict.fromkeys(("fastest", "fewer"), ("throughput_per_s", "throughput_low", "throughput_high")),
    **dict.fromkeys(("choice", "improved", "ingest"), ("ratio", "low", "high")),
    "training": ("time_to_target_s", "least_s", "most_s"),
    "scaling": ("efficiency", "efficiency_low", "efficiency_high"),
    "loss": ("share", "low", "high"),
    "equivalence": ("difference", "low", "high"),
}
"""By topic, the facts of a statement that are ``value``, ``low`` and ``high`` in the table VERDICT."""


class TableFailed(Exception):
    """A rule needs a table that failed by an error of the harness. ``name``: that of the table."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Tables:
    """The tables of a run by name; one that failed raises TableFailed.

    ``read`` returns a table, None if it failed. ``look``: how often the run has been looked at, from 1, if the
    experiment file gives the number of blocks, so that blocks can be added; None if a rule does. ``significance``: the
    p-value up to which a difference is clear.
    """

    read: Callable[[str], pd.DataFrame | None]
    look: int | None = 1
    significance: float = SIGNIFICANCE

    @property
    def next_significance(self) -> float:
        """The significance of the next look, after further blocks."""
        return look_significance(self.look + 1) if self.look else self.significance

    def __getitem__(self, name: str) -> pd.DataFrame:
        table = self.read(name)
        if table is None:
            raise TableFailed(name)
        return table


@dataclass(frozen=True)
class Statement:
    """One statement of the verdict: a row of the table VERDICT, which documents its columns.

    ``facts``: its numbers by the names that they have in the table of the evidence, mostly the row of that table;
    ``p_adjusted`` is that of a choice. ``n``: a whole number, or None.
    """

    topic: str
    code: str
    evidence: str
    cell_id: str | None = None
    others: tuple[str, ...] = ()
    facts: Row = field(default_factory=lambda: Row({}))
    n: Any = None
    subject: str | None = None
    reasons: tuple[str, ...] = ()

    def row(self) -> dict[str, object]:
        """Return the row of the table VERDICT."""
        columns = {"devices": "devices", "p_value": "p_adjusted"}
        columns |= zip(("value", "low", "high"), NUMBERS.get(self.topic, ()), strict=False)
        own = {name: value for name, value in vars(self).items() if name != "facts"}
        return {**own, **{column: self.facts.get(name) for column, name in columns.items()}}
