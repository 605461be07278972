"""Examinations -> what the doctor found, one row a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from harness.record.schema import AXES, FINDINGS

FAILED = {
    "check": "it runs",
    "severity": "error",
    "means": "the examination itself failed: the cells that it stands for will, too",
    "advice": "read its log, and run the workload as `single` on one device first",
}


def findings(lines: Sequence[Mapping[str, Any]], trials: pd.DataFrame) -> pd.DataFrame:
    """The findings of each cell's newest examination. That it failed is one, unless it had found an error before."""
    last = {line["trial_id"]: line for line in lines if line["purpose"] == "doctor"}
    named = trials.drop_duplicates("trial_id", keep="last").set_index("trial_id")
    rows = []
    for trial_id, line in last.items():
        found = list(line["facts"].get("findings", []))
        if line["outcome"] not in ("ok", "skipped") and not any(f["severity"] == "error" for f in found):
            found.append({**FAILED, "seen": str(line["reason"])})
        axes = {axis: named.loc[trial_id, axis] for axis in ("cell_id", *AXES)}
        rows += [{"trial_id": trial_id, **axes, **finding} for finding in found]
    return FINDINGS.frame(rows)


def figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, str]]:
    """What the newest examinations measured on the way, in words, by trial."""
    return {
        line["trial_id"]: line["facts"]["figures"]
        for line in lines
        if line["purpose"] == "doctor" and line["facts"].get("figures")
    }
