"""The plan and its trials as plain values: columns of the table of trials, and plan.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from harness.plan import Plan
from harness.trial import Trial

SCHEMA_VERSION = 2


def trial_columns(trial: Trial) -> dict[str, Any]:
    """A trial's identity and axes, as columns of the table of trials."""
    cell = trial.cell
    # a check's global batch need not divide by the devices: shares may be uneven there
    base = cell.base_id if cell.per_device_batch_size or trial.purpose == "equivalence" else None
    return {
        "trial_id": trial.id,
        "cell_id": cell.id,
        "base_id": base,
        "check_id": trial.check_id,
        "alone_id": cell.alone_id if cell.per_device_batch_size else None,
        "wrapped_id": cell.wrapped_id if cell.per_device_batch_size else None,
        "kind": trial.kind,
        "purpose": trial.purpose,
        "block": trial.block,
        "seed": trial.seed,
        "added": trial.added,
        "workload": cell.workload,
        "data": cell.data,
        "model": cell.model,
        "strategy": cell.strategy,
        "device": cell.device,
        "devices": cell.devices,
        "nodes": cell.nodes,
        "scaling": cell.scaling,
        "per_device_batch_size": cell.per_device_batch_size,
        "global_batch_size": cell.global_batch_size,
        "precision": cell.precision,
        "compile": cell.compile,
        "launcher": cell.launcher,
        "oversubscribed": cell.oversubscribe,
        "emulated": cell.emulated,
        "options": json.dumps(cell.options, sort_keys=True),
    }


def plan_content(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, for plan.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "inventory": asdict(plan.inventory),
        "machine": asdict(plan.machine),
        "order_seed": plan.experiment.seed,
        "groups": [
            {"id": g.id, "block": g.block, "placement": str(g), "trials": [t.id for t in g.trials]} for g in plan.groups
        ],
        "skipped": [{**trial_columns(skip.trial), "reason": skip.reason} for skip in plan.skips],
    }
