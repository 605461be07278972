"""What the doctor finds without a rank: in what was planned, and in how the nodes compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from harness.plan.checks import batches, links, versions
from harness.record.schema import AXES, FINDINGS


def findings(plan: Mapping[str, Any], environment: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of schema.FINDINGS: batches that do not divide, and, of no cell in particular, what the nodes are.

    ``plan`` and ``environment`` are the contents of plan.json and environment.json.
    """
    uneven = {row["cell_id"]: row for row in plan["skipped"] if row["per_device_batch_size"] is None}
    rows = [
        {**{axis: row.get(axis) for axis in ("cell_id", *AXES)}, **finding.row()}
        for row in uneven.values()
        for finding in batches.uneven_batch(row["strategy"], row["devices"], row["global_batch_size"])
    ]
    of_nodes = [  # nodes that worked together, of which each finding counts once
        finding
        for group in environment.get("groups", ())
        for finding in [*versions.judge(group["nodes"]), *links.judge(group["nodes"])]
    ]
    return FINDINGS.frame([*rows, *(finding.row() for finding in dict.fromkeys(of_nodes))])
