"""The cells that are skipped after an error of the doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.config.values import GIB
from harness.doctor.gate import memory_estimates, skip_reason, skip_rules
from harness.plan.cell import Cell
from tests.plan.test_memory_estimate import kept, sizes

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
        ("GPU copies", {"device_ids": (1, 2)}, False),
    ],
)
def test_a_cell_is_refused_for_findings_that_apply(check: str, change: dict[str, Any], *, is_refused: bool) -> None:
    reason = skip_reason(skip_rules(EXAMINED, facts(check)), replace(EXAMINED, **change), "throughput")
    text = f"preflight: {check}: something (to reproduce it on purpose: allow: [shapes])"
    assert (reason and reason.text) == (text if is_refused else None)
    assert (reason and reason.code) == ("doctor" if is_refused else None)


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),
        ({"optimizer": {"name": "AdamW"}}, True),
        ({"devices": 4}, False),
        ({"global_batch_size": 64}, False),
        ({"precision": "bf16"}, False),
        ({"compile": True}, True),  # the doctor's own steps are not compiled
    ],
)
def test_what_raised_may_train_with_another_size_or_precision(change: dict[str, Any], *, is_refused: bool) -> None:
    assert (
        bool(skip_reason(skip_rules(EXAMINED, facts("execution")), replace(EXAMINED, **change), "throughput"))
        == is_refused
    )


def test_an_evaluation_that_fails_stops_trainings_to_convergence_alone() -> None:
    rules = skip_rules(EXAMINED, facts("evaluation"))
    assert not skip_reason(rules, EXAMINED, "throughput") and not skip_reason(rules, EXAMINED, "equivalence")
    assert (reason := skip_reason(rules, EXAMINED, "convergence")) and reason.text == "preflight: evaluation: something"
    assert not skip_reason(rules, replace(EXAMINED, devices=4), "convergence")


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),
        ({"per_device_batch_size": 128}, True),
        ({"per_device_batch_size": 32}, False),
        ({"training": {"accumulation": 2}}, False),
        ({"precision": "bf16"}, False),
        ({"compile": True}, False),  # its activations are not known
        ({"optimizer": {"name": "SGD"}}, False),
        ({"strategy": "single"}, False),
    ],
)
def test_a_cell_is_refused_for_its_own_estimate(change: dict[str, Any], *, is_refused: bool) -> None:
    # 1 + 1 + 2 + 1 (the replica's) GiB of state, and 64 samples of 1/32 GiB in fp32: 7 GiB
    examined = replace(EXAMINED, optimizer={"name": "AdamW"})
    model = sizes(activations={"fp32": kept(GIB // 32), "bf16": kept(GIB // 64)}, device_bytes=int(4.5 * GIB))
    rules = skip_rules(examined, {**facts("memory"), "memory": model})
    reason = skip_reason(rules, replace(examined, **change), "throughput")
    assert (reason and reason.code) == ("doctor_memory" if is_refused else None)
    assert reason is None or "available: 4.5 GiB" in reason.text


def test_estimates_of_the_cells_of_a_kind() -> None:
    model = sizes(activations={"fp32": kept(GIB // 32)})
    other, compiled = replace(EXAMINED, model="large"), replace(EXAMINED, compile=True)
    found = memory_estimates(EXAMINED, {"memory": model}, [EXAMINED, EXAMINED, other, compiled])
    assert found == {EXAMINED.id: 7 * GIB}  # 1 + 1 + 1, an optimizer that is not known 2, and 2
    assert memory_estimates(EXAMINED, {}, [EXAMINED]) == {}


def test_a_warning_an_error_that_stops_nothing_and_one_that_the_file_allows_refuse_nothing() -> None:
    both = {"findings": [*facts("GPU copies")["findings"], *facts("output shapes")["findings"]]}
    assert skip_rules(EXAMINED, facts("GPU copies"), ("copies", "divergence")) == []
    assert [rule.reason.text.split(":")[1] for rule in skip_rules(EXAMINED, both, ("copies",))] == [" output shapes"]
    marked, stops = ({"findings": [{**facts("c")["findings"][0], "stops": value}]} for value in (False, True))
    assert skip_rules(EXAMINED, marked) == []  # type: ignore[arg-type]
    assert len(skip_rules(EXAMINED, stops)) == 1  # type: ignore[arg-type]
    assert skip_rules(EXAMINED, facts("memory", "warning")) == [] and skip_rules(EXAMINED, {}) == []
