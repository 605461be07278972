"""The doctor's checks by the names of their files, as ``allow`` names them, each with the names of its findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.errors import nearest

FINDINGS_OF: Mapping[str, str] = {
    "transfer": "batch transfer",
    "devices": "device placement",
    "randomness": "randomness",
    "loss_parameters": "parameter updates",
    "state": "state in forward",
    "shapes": "output shapes",
    "data": "data sharding",
    "validation": "validation set",
    "memory": "memory",
    "batches": "batch divisibility",
    "copies": "GPU copies",
    "loss_weight": "loss weight",
    "padding": "padding",
    "wrapper": "wrapper use",
    "parameters": "parameter updates",
    "train_mode": "train mode",
    "rank_state": "state in forward",
    "memory_growth": "memory growth",
    "slow_rank": "slow rank",
    "threads": "threads",
    "divergence": "divergence",
    "gradients": "gradient scaling",
    "loader": "loader throughput",
    "collectives": "collectives",
}
"""A test compares the names with the files of harness/doctor."""


def check_allowed(value: object) -> object:
    """Return the name of a check; raise ValueError at any other."""
    if isinstance(value, str) and value not in FINDINGS_OF:
        raise ValueError(f"got {value[:80]!r}; {nearest(value[:80], FINDINGS_OF)}")
    return value


def allowed_findings(allow: Collection[str]) -> frozenset[str]:
    """Return the names of the findings of these checks."""
    return frozenset(FINDINGS_OF[name] for name in allow)


def how_to_allow(finding: str) -> str:
    """Return the clause on how to measure what findings of this name refuse; empty if that is impossible."""
    name = next((name for name, findings in FINDINGS_OF.items() if findings == finding), "")
    return f" (to reproduce it on purpose: allow: [{name}])" if name else ""
