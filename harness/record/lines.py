"""A trial and a plan as plain values: lines of trials.jsonl, plan.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from harness.plan.cell import MEASURES
from harness.plan.comparison import axes_of, partner_ids, set_ids
from harness.plan.planner import Plan, codes_of
from harness.plan.rows import Circumstances, Json, RecordedTrial, TrialColumns
from harness.plan.trial import Columns, Trial, TrialResult
from harness.record.schema import CHECKS, EPOCHS, STEPS, TRAINING_STEPS, Table
from harness.system import sanitize

UNCHANGED = (
    *("outcome", "reason", "skip_code", "error_type", "error_rank", "started_at", "trial_s", "steps_s", "unit"),
    *("parameters", "facts"),
)
"""The attributes of a result that are in its line as they are."""


def rows_of(result: TrialResult, name: str) -> dict[str, tuple[Table, Columns]]:
    """Return the rows that a trial has, with their table, by the stem of their file in raw/.

    The steps of timed windows (one row a step, of its slowest rank, unless ``throughput.keep_steps`` is all), a check's
    update, or the epochs of a training and, in a file of their own, its steps.
    """
    tables = (
        (STEPS, result.steps),
        (EPOCHS, result.epochs),
        (CHECKS, result.checks),
        (TRAINING_STEPS, result.training_steps),
    )
    return {raw_name(table, name): (table, rows) for table, rows in tables if any(map(len, rows.values()))}


def tables_of(line: RecordedTrial) -> tuple[Table, ...]:
    """Return the tables in which a trial can have such rows."""
    if line["kind"] == "convergence":
        return EPOCHS, TRAINING_STEPS
    return (CHECKS,) if line["purpose"] == "equivalence" else (STEPS,)


def line_of(trial: Trial, result: TrialResult, circumstances: Circumstances, log: str | None) -> RecordedTrial:
    """Return an attempt at a trial as it is recorded, without secrets."""
    line = {
        **trial_columns(trial),
        **circumstances,
        **{name: getattr(result, name) for name in UNCHANGED},
        "parts": dict(result.parts),
        "ranks": list(result.ranks),
        "windows": list(result.windows),
        "links": list(result.links) or None,
        "exchanges": list(result.exchanges) or None,
        "log": log,
    }
    return cast("RecordedTrial", sanitize.redact_row(line))


SCHEMA = 6
"""The version of the files of a run folder; folders of another one are not read."""


def raw_name(table: Table, name: str) -> str:
    """Return the stem of the file in raw/ with a trial's rows of a table; ``name``: '<trial>-<attempt>'."""
    return f"{name}-steps" if table is TRAINING_STEPS else name


def trial_columns(trial: Trial) -> TrialColumns:
    """Return a trial's identity and axes as columns of the table of trials."""
    cell = trial.cell
    axes = axes_of(cell)
    return {
        "trial_id": trial.id,
        "cell_id": cell.id,
        # a check's global batch need not be divisible by the devices: its shares may be uneven
        **partner_ids(cell, equivalence=trial.purpose == "equivalence"),
        "check_id": trial.check_id,
        **set_ids(axes),
        "kind": trial.kind,
        "purpose": trial.purpose,
        "block": trial.block,
        "seed": trial.seed,
        "added": trial.added,
        **axes,
        "code": cell.code,
    }


def plan_content(plan: Plan) -> Json:
    """Return the plan as plain values, for plan.json."""
    return {
        "schema": SCHEMA,
        "measures": MEASURES,
        "inventory": asdict(plan.inventory),
        "machine": asdict(plan.machine),
        "order_seed": plan.experiment.seed,
        "groups": [
            {"id": g.id, "block": g.block, "placement": str(g), "trials": [t.id for t in g.trials]} for g in plan.groups
        ],
        "cells": {cell.id: plan.labels.of_cell(cell) for cell in dict.fromkeys(trial.cell for trial in plan.trials)},
        "impossible": [
            {"cell_id": each.cell.id, **axes_of(each.cell), "reason": each.reason, "skip_code": each.skip_code}
            for each in plan.impossible
        ],
        "variants": codes_of(plan),
        "skipped": [
            {**trial_columns(skip.trial), "reason": skip.reason, "skip_code": skip.skip_code} for skip in plan.skips
        ],
    }


def merged(before: Json, now: Json) -> Json:
    """Return a plan.json extended by the new parts of a later plan, such as added blocks; no entry is lost."""
    known = {trial_id for group in before["groups"] for trial_id in group["trials"]}
    skipped = {row["trial_id"] for row in before["skipped"]}
    impossible = {row["cell_id"]: row for row in [*before.get("impossible", []), *now["impossible"]]}
    more = [{**group, "trials": [t for t in group["trials"] if t not in known]} for group in now["groups"]]
    return {
        **before,
        "groups": [*before["groups"], *(group for group in more if group["trials"])],
        "cells": {**before.get("cells", {}), **now["cells"]},
        "impossible": list(impossible.values()),
        "skipped": [*before["skipped"], *(row for row in now["skipped"] if row["trial_id"] not in skipped)],
    }
