"""What is left to do of a plan, given what was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.cell import Cell
from harness.messages import PRECISE, PRUNED
from harness.plan import Plan
from harness.trial import Trial, WorkerGroup


def pending(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> tuple[WorkerGroup, ...]:
    """The worker groups with the trials that are not ok yet and not known to lack memory.

    A block that is measured in two parts measures its bases again in the second: pairs form only between
    trials of the same sitting.
    """
    done = {line["trial_id"] for line in lines if line["outcome"] == "ok" or _is_precise(line)}
    last = {line["trial_id"]: line for line in lines if plan.experiment.limits.prune_oom}
    pruned = {trial_id for trial_id, line in last.items() if line["outcome"] == "oom" or _is_pruned(line)}
    missing = [trial for trial in plan.trials if trial.id not in done | pruned]
    failed = {line["trial_id"] for line in lines if line["outcome"] not in ("ok", "skipped")}
    wanted = {trial.id for trial in missing} | _bases(plan, missing, done, failed)
    groups = (replace(g, trials=tuple(t for t in g.trials if t.id in wanted)) for g in plan.groups)
    return tuple(group for group in groups if group.trials)


def _is_precise(line: Mapping[str, Any]) -> bool:
    return line["outcome"] == "skipped" and str(line.get("reason", "")).startswith(PRECISE)


def _is_pruned(line: Mapping[str, Any]) -> bool:
    return line["outcome"] == "skipped" and str(line.get("reason", "")).endswith(PRUNED)


def out_of_memory(plan: Plan, lines: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The cells that ran out of memory and are not to be tried again."""
    if not plan.experiment.limits.prune_oom:
        return []
    found = {line["trial_id"] for line in lines if line["outcome"] == "oom"}
    return list(dict.fromkeys(trial.cell for trial in plan.trials if trial.id in found))


def attempts(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each trial was recorded so far."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line["trial_id"]] = max(counts.get(line["trial_id"], 0), int(line["attempt"]))
    return counts


def _bases(plan: Plan, missing: list[Trial], done: set[str], failed: set[str]) -> set[str]:
    """The finished trials that the missing ones are compared with in their block.

    Where a base failed, its stand-in: the smallest device count of the same strategy that was measured.
    """
    timed = [trial for trial in plan.trials if trial.kind == "throughput"]
    twins = {(trial.block, trial.cell): trial.id for trial in plan.trials if trial.purpose == "twin"}
    by_cell = {(t.block, t.cell): t for t in plan.trials if t.timed and t.purpose != "twin"}
    stand_ins: dict[tuple[int, Cell], Trial] = {}
    for trial in sorted(timed, key=lambda t: t.cell.devices, reverse=True):
        if trial.id in done:
            stand_ins[trial.block, _family(trial.cell)] = trial
    found = set()
    for trial in missing:
        if trial.timed and trial.cell.per_device_batch_size:
            found |= {twins.get((trial.block, trial.cell.base()), trial.id)}
            base = by_cell.get((trial.block, trial.cell.base()))
            if base and base.id in failed - done:
                base = stand_ins.get((trial.block, _family(trial.cell)))
            found |= {base.id} if base else set()
            partners = [*_other_launchers(trial.cell)]
            if plan.experiment.explains:
                partners += [trial.cell.alone(), trial.cell.wrapped_alone()]
            found |= {by_cell[trial.block, cell].id for cell in partners if (trial.block, cell) in by_cell}
    return found


def _other_launchers(cell: Cell) -> list[Cell]:
    return [replace(cell, launcher=launcher) for launcher in ("ray", "torchrun") if launcher != cell.launcher]


def _family(cell: Cell) -> Cell:
    """What cells share that differ in their device count alone."""
    batch = cell.global_batch_size if cell.scaling == "strong" else cell.per_device_batch_size
    return replace(
        cell, devices=1, nodes=1, oversubscribe=False, per_device_batch_size=batch, global_batch_size=batch or 0
    )
