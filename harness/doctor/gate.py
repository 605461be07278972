"""Which cells are not measured after what the doctor found in one of their kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.plan.cell import Cell
from harness.plan.rows import FindingRow, SkipCode, TrialFacts
from harness.plan.trial import SkipReason

BY_BATCH = "memory"
"""The check whose error holds for the examined batch and larger ones; any other holds for every batch."""
SKIP_RULES = "skip rules"
"""Where a process keeps them for its later trials (``TrialContext.cache``)."""


@dataclass(frozen=True)
class SkipRule:
    """``least_batch``: the smallest batch per device that it holds for."""

    workload_key: tuple[str, ...]
    least_batch: int
    reason: SkipReason


def errors(facts: TrialFacts) -> Sequence[FindingRow]:
    """The errors among an examination's findings."""
    return [finding for finding in facts.get("findings", ()) if finding["severity"] == "error"]


def skip_rules(examined: Cell, facts: TrialFacts) -> list[SkipRule]:
    """What an examination's errors refuse."""
    found = []
    for finding in errors(facts):
        least = (examined.per_device_batch_size or 0) if finding["check"] == BY_BATCH else 0
        code: SkipCode = "doctor_memory" if finding["check"] == BY_BATCH else "doctor"
        reason = SkipReason(code, f"preflight: {finding['check']}: {finding['seen']}")
        found.append(SkipRule(examined.workload_key, least, reason))
    return found


def skip_reason(found: Iterable[SkipRule], cell: Cell) -> SkipReason | None:
    """Why a cell is not measured; None where nothing refuses it."""
    batch = cell.per_device_batch_size or 0
    return next(
        (one.reason for one in found if one.workload_key == cell.workload_key and batch >= one.least_batch), None
    )
