"""Plan and recorded trials -> the planned trials without a result, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.analysis.common import Lines
from harness.plan.environment import RunEnvironment
from harness.record.schema import MISSING

WHY = {
    "interrupted": "not started: the run was interrupted",
    "finished": "not started: it was no part of the last call (--only, or another machine)",
    "error": "not started: the run ended with an error of its own",
    None: "not started: the run was killed, or is still going on",
}
"""By the end of the last invocation; None if it recorded none, since its process was killed."""
RUNNING = "cut short: it was being measured when the run was interrupted"


def missing(lines: Lines, plan: Mapping[str, Any], environment: RunEnvironment) -> pd.DataFrame:
    """Return one row a planned trial without a recorded line, in the order of the plan."""
    invocations = environment.get("invocations", [])
    last = invocations[-1] if invocations else {}
    why = WHY.get(last.get("ended"), WHY[None])
    recorded = {line["trial_id"] for line in lines}
    labels = plan.get("cells", {})
    rows = []
    for group in plan["groups"]:
        for trial_id in group["trials"]:
            if trial_id not in recorded:
                cell_id = trial_id.rpartition("-")[0]
                rows.append(
                    {
                        "trial_id": trial_id,
                        "cell_id": cell_id,
                        "label": labels.get(cell_id),
                        "block": group["block"],
                        "reason": RUNNING if trial_id == last.get("running") else why,
                    }
                )
    return MISSING.frame(rows)
