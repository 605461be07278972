"""The cells that are skipped after an error of the doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.doctor.gate import skip_reason, skip_rules
from harness.plan.cell import Cell

EXAMINED = Cell("w", "digits", "small", "dp", "cuda", 2, 1, "weak", 64, 128)


def facts(check: str, severity: str = "error") -> dict[str, Any]:
    return {"findings": [{"check": check, "severity": severity, "seen": "something"}]}


@pytest.mark.parametrize(
    ("check", "change", "is_refused"),
    [
        ("output shapes", {}, True),
        ("output shapes", {"per_device_batch_size": 8}, True),
        ("output shapes", {"devices": 4}, True),
        ("output shapes", {"strategy": "ddp"}, False),
        ("output shapes", {"model": "large"}, False),
        ("memory", {}, True),
        ("memory", {"per_device_batch_size": 128}, True),
        ("memory", {"per_device_batch_size": 63}, False),
        ("GPU copies", {"device_ids": (1, 2)}, False),
    ],
)
def test_a_cell_is_refused_for_findings_that_apply_to_it(
    check: str, change: dict[str, Any], *, is_refused: bool
) -> None:
    reason = skip_reason(skip_rules(EXAMINED, facts(check)), replace(EXAMINED, **change))
    assert (reason and reason.text) == (f"preflight: {check}: something" if is_refused else None)
    assert (reason and reason.code) == (("doctor_memory" if check == "memory" else "doctor") if is_refused else None)


def test_a_warning_refuses_nothing() -> None:
    assert skip_rules(EXAMINED, facts("memory", "warning")) == [] and skip_rules(EXAMINED, {}) == []
