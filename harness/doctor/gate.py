"""The cells that are skipped after an error of the doctor in a cell of the same kind."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.config.doctor_checks import allowed_findings, how_to_allow
from harness.plan import memory_forecast as memory
from harness.plan.cell import Cell
from harness.plan.rows import FindingRow, MemoryFacts, TrialFacts
from harness.plan.trial import SkipReason, TrialResult

DIVERGENCE = "divergence"
GROWTH, LEAST = 4.0, 0.5
"""A loss diverges beyond GROWTH times the first loss plus LEAST; the first may be near zero."""
EXECUTION = "execution"
"""The name of findings on the examination itself: what raised or hung in it."""
EVALUATION = "evaluation"
"""The name of findings on the evaluation of an epoch, which stop trainings to convergence alone."""
SKIP_RULES = "skip rules"
"""The key of ``TrialContext.cache`` under which a process keeps the rules for its later trials."""


@dataclass(frozen=True)
class SkipRule:
    """Cells that are skipped: all with this key, or, with ``model``, those whose own estimate of memory is an error.

    An estimate is in a cell's precision, compilation, batch, accumulation, optimizer and number of devices. With
    ``like``, the cells of its batch and number of devices alone, and with ``precision`` those of this one: what raises
    there may train with others. ``scenario``: if given, trials of this one alone.
    """

    workload_key: tuple[str, ...]
    reason: SkipReason
    model: MemoryFacts | None = None
    like: Cell | None = None
    precision: str | None = None
    scenario: str | None = None

    def reason_for(self, cell: Cell, scenario: str) -> SkipReason | None:
        """Return the reason to skip a trial of a cell; None if the rule does not apply to it."""
        if (
            self.scenario not in (None, scenario)
            or cell.workload_key != self.workload_key
            or self.precision not in (None, cell.precision)
        ):
            return None
        if self.like and _size(cell) != _size(self.like):
            return None
        if self.model is None:
            return self.reason
        errors = [finding for finding in memory.judge(self.model, cell) if finding.severity == "error"]
        return SkipReason("doctor_memory", f"preflight: {memory.NAME}: {errors[0].seen}") if errors else None


def _size(cell: Cell) -> tuple[int, int]:
    return cell.devices, cell.global_batch_size


def errors(facts: TrialFacts, allow: Collection[str] = ()) -> Sequence[FindingRow]:
    """Return the errors that stop the cells of a doctor trial, but those of the checks that are allowed."""
    allowed = allowed_findings(allow)
    found = (finding for finding in facts.get("findings", ()) if finding["severity"] == "error")
    return [finding for finding in found if finding.get("stops", True) and finding["check"] not in allowed]


def failed_rules(examined: Cell, result: TrialResult) -> list[SkipRule]:
    """Return the rule that follows from a doctor trial that hung, or in which the workload could not be built.

    What raises later has a finding: an error if the user's code did, a warning if a check of the doctor did.
    """
    built = "findings" in result.facts
    if result.outcome != "timeout" and (result.outcome != "error" or built):
        return []
    return [SkipRule(examined.workload_key, SkipReason("doctor", f"preflight: {EXECUTION}: {result.reason}"))]


def skip_rules(examined: Cell, facts: TrialFacts, allow: Collection[str] = ()) -> list[SkipRule]:
    """Return the rules that follow from the errors of a doctor trial, but those of the checks that are allowed."""
    found = []
    for finding in errors(facts, allow):
        model = facts.get("memory") if finding["check"] == memory.NAME else None
        how = how_to_allow(finding["check"])
        reason = SkipReason("doctor", f"preflight: {finding['check']}: {finding['seen']}{how}")
        rule = SkipRule(examined.workload_key, reason, model)
        if finding["check"] in (EXECUTION, EVALUATION):
            scenario = "convergence" if finding["check"] == EVALUATION else None
            rule = replace(rule, like=examined, precision=examined.precision, scenario=scenario)
        found.append(rule)
    return found


def diverges(losses: Sequence[float]) -> bool:
    """Return whether a loss is not finite, or the last one exceeds GROWTH times the first plus LEAST."""
    if not all(map(math.isfinite, losses)):
        return True
    return losses[-1] > GROWTH * abs(losses[0]) + LEAST


def skip_reason(found: Iterable[SkipRule], cell: Cell, scenario: str) -> SkipReason | None:
    """Return the reason why a trial of a cell is skipped; None if no rule applies to it."""
    return next((reason for rule in found if (reason := rule.reason_for(cell, scenario))), None)


def memory_estimates(examined: Cell, facts: TrialFacts, cells: Iterable[Cell]) -> dict[str, int]:
    """Return the estimated peak memory of the cells of the examined kind, in bytes by cell id."""
    model = facts.get("memory")
    if model is None:
        return {}
    of_kind = (cell for cell in dict.fromkeys(cells) if cell.workload_key == examined.workload_key)
    found = {cell.id: memory.estimate(model, cell) for cell in of_kind}
    return {cell_id: peak for cell_id, peak in found.items() if peak is not None}
