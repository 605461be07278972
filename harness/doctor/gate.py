"""Which cells are not measured after an error of the doctor in a cell of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.plan.cell import Cell
from harness.plan.rows import FindingRow, SkipCode, TrialFacts
from harness.plan.trial import SkipReason

BY_BATCH = "memory"
"""The check whose errors apply to the examined batch and larger ones; any other applies to every batch."""
SKIP_RULES = "skip rules"
"""The key of ``TrialContext.cache`` under which a process keeps the rules for its later trials."""


@dataclass(frozen=True)
class SkipRule:
    """Cells that are not measured. ``least_batch``: the smallest batch per device that the rule applies to."""

    workload_key: tuple[str, ...]
    least_batch: int
    reason: SkipReason


def errors(facts: TrialFacts) -> Sequence[FindingRow]:
    """Return the errors among the findings of a doctor trial."""
    return [finding for finding in facts.get("findings", ()) if finding["severity"] == "error"]


def skip_rules(examined: Cell, facts: TrialFacts) -> list[SkipRule]:
    """Return the rules that follow from the errors of a doctor trial."""
    found = []
    for finding in errors(facts):
        least = (examined.per_device_batch_size or 0) if finding["check"] == BY_BATCH else 0
        code: SkipCode = "doctor_memory" if finding["check"] == BY_BATCH else "doctor"
        reason = SkipReason(code, f"preflight: {finding['check']}: {finding['seen']}")
        found.append(SkipRule(examined.workload_key, least, reason))
    return found


def skip_reason(found: Iterable[SkipRule], cell: Cell) -> SkipReason | None:
    """Return the reason why a cell is not measured; None if no rule applies to it."""
    batch = cell.per_device_batch_size or 0
    return next(
        (one.reason for one in found if one.workload_key == cell.workload_key and batch >= one.least_batch), None
    )
