"""What is recorded of one trial: its line, and what has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.plan.trial import Columns, Trial, TrialResult
from harness.plan_rows import trial_columns
from harness.schema import CHECKS, EPOCHS, STEPS, Table
from harness.system import sanitize


@dataclass(frozen=True)
class Record:
    """What became of a trial, and the circumstances: attempt, sitting, group_id, position."""

    trial: Trial
    result: TrialResult
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.trial.id}-{self.facts['attempt']}"

    @property
    def rows(self) -> tuple[Table, Columns] | None:
        """Every rank's steps or epochs, or the update of a check; None where it measured none."""
        tables = ((STEPS, self.result.steps), (EPOCHS, self.result.epochs), (CHECKS, self.result.checks))
        return next(((table, columns) for table, columns in tables if columns), None)

    @property
    def log(self) -> str | None:
        """Where the text of a failure is, from the run folder."""
        return f"logs/{self.name}.txt" if self.result.detail else None

    def line(self) -> dict[str, Any]:
        """All but what is long."""
        elsewhere = ("trial_id", "detail", "steps", "epochs", "checks")
        columns = {field.name: getattr(self.result, field.name) for field in fields(self.result)}
        short = {name: value for name, value in columns.items() if name not in elsewhere}
        return sanitize.row({**trial_columns(self.trial), **self.facts, **short, "log": self.log})
