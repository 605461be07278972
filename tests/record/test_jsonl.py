"""Upgrade of lines of older schema versions to the current one."""

from __future__ import annotations

import pytest

from harness.record.jsonl import _skip_code


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("time is up: limits.wall was reached", "time_up"),
        ("precise enough: 3 blocks suffice for 10 %", "precise"),
        ("a batch of 8 per device of the same cell ran out of memory (limits.prune_oom)", "out_of_memory"),
        ("preflight: memory: a batch of 64 per device needs about 9 GiB", "doctor_memory"),
        ("preflight: shapes survive: 2 devices are asked for", "doctor"),
        ("global batch 128 exceeds the 100 training samples", "too_few_samples"),
        ("the check's global batch 8 exceeds the 4 training samples", "too_few_samples"),
        (
            "loss or model draw random numbers even when the model only evaluates: no two runs are alike",
            "random_evaluation",
        ),
        ("something that no version wrote", None),
    ],
)  # reasons of infeasible cells: tests/plan/test_feasibility.py
def test_reasons_of_older_folders_have_codes(reason: str, code: str | None) -> None:
    assert _skip_code({"outcome": "skipped", "reason": reason}) == code
    assert _skip_code({"outcome": "error", "reason": reason}) is None
