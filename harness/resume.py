"""What is left to do of a plan, given what was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.plan import Plan, WorkerGroup


def pending(plan: Plan, lines: Iterable[Mapping[str, Any]]) -> tuple[WorkerGroup, ...]:
    """The worker groups with the trials that are not ok yet.

    A block that is measured in two parts measures its bases again in the second: pairs form only between
    trials of the same sitting.
    """
    done = {line["trial_id"] for line in lines if line["outcome"] == "ok"}
    missing = [trial for trial in plan.trials if trial.id not in done]
    bases = {
        (trial.block, trial.cell.base().id)
        for trial in missing
        if trial.kind == "throughput" and trial.cell.per_device_batch_size
    }
    wanted = {trial.id for trial in missing}
    wanted |= {t.id for t in plan.trials if t.kind == "throughput" and (t.block, t.cell.id) in bases}
    groups = (replace(g, trials=tuple(t for t in g.trials if t.id in wanted)) for g in plan.groups)
    return tuple(group for group in groups if group.trials)


def attempts(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each trial was recorded so far."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line["trial_id"]] = max(counts.get(line["trial_id"], 0), int(line["attempt"]))
    return counts
