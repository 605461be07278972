"""The tuple CHECKS: complete, in order, and with the conditions of each check."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.config.doctor_checks import FINDINGS_OF
from harness.doctor import copies, divergence, gradients, loader, loss_parameters, memory, parameters, shapes, wrapper
from harness.doctor.all_checks import CHECKS
from harness.doctor.check import Check
from harness.plan.checks import batches, catalogue, links, network, versions
from harness.plan.checks import memory as memory_of_a_plan
from harness.plan.checks.finding import Finding
from harness.plan.rows import Severity
from tests.doctor.faulty import FAULTS

FOLDER = Path(__file__).parents[2] / "harness" / "doctor"
SHARED = {"steps"}
"""Modules that observe for several checks, and judge nothing."""


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_names_that_are_known_without_torch_are_those_of_the_checks() -> None:
    without_ranks = {batches.NAME, links.NAME, memory_of_a_plan.NAME, network.NAME, versions.NAME}
    assert set(catalogue.CHECKS) == {check.name for check in CHECKS} | without_ranks


WRITTEN = sorted(path.stem for path in FOLDER.glob("*.py") if functions(path) & {"observe", "judge"})


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in SHARED])
def test_every_module_that_observes_or_judges_has_a_check_and_it_is_in_the_list(name: str) -> None:
    module = importlib.import_module(f"harness.doctor.{name}")
    own = [key for key, value in vars(module).items() if isinstance(value, Check)]
    assert own, f"harness/doctor/{name}.py observes or judges, and has no Check"
    for key in own:
        assert getattr(module, key) in CHECKS, f"harness/doctor/all_checks.py: CHECKS lacks {name}.{key}"


OF_NO_FAULTY_WORKLOAD = {"batch divisibility", "GPU copies"}
"""Checks that no workload can fail: test_examine.py has their cases."""
REPORTS_AS = {
    "loss parameters": "parameter updates",
    "random streams": "randomness",
    "state on ranks": "state in forward",
}
"""Checks whose findings have another check's name."""


@pytest.mark.parametrize("name", [check.name for check in CHECKS if check.name not in OF_NO_FAULTY_WORKLOAD])
def test_every_check_has_a_faulty_workload_that_it_must_find(name: str) -> None:
    assert REPORTS_AS.get(name, name) in FAULTS, "tests/doctor/faulty.py: FAULTS has no workload for it"


def test_the_files_that_allow_names_are_those_of_the_checks() -> None:
    modules: dict[str, set[str]] = {}
    for check in CHECKS:
        modules.setdefault(check.judge.__module__.rpartition(".")[2], set()).add(REPORTS_AS.get(check.name, check.name))
    assert {name: {findings} for name, findings in FINDINGS_OF.items()} == modules
    assert list(FINDINGS_OF) == list(modules)


def test_no_two_checks_have_one_name() -> None:
    names = Counter(check.name for check in CHECKS)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_order_of_the_checks() -> None:
    alone = [check.name for check in CHECKS if not check.after_steps]
    after = [check.name for check in CHECKS if check.after_steps]
    assert [check.name for check in CHECKS] == [*alone, *after]
    # the wrapper before what it explains; the two rates last, when nothing else can still be found
    assert after.index(wrapper.NAME) < after.index(parameters.NAME) < after.index(divergence.NAME)
    assert after[-3:] == [gradients.NAME, loader.NAME, "collectives"]


def test_the_checks_whose_errors_forbid_real_steps() -> None:
    assert [check for check in CHECKS if check.stops] == [
        loss_parameters.CHECK,
        shapes.CHECK,
        memory.CHECK,
        copies.CHECK,
    ]


@pytest.mark.parametrize(
    ("check", "by", "severity", "left_out"),
    [
        (parameters.CHECK, wrapper.NAME, "error", True),
        (parameters.CHECK, "data sharding", "error", False),
        (divergence.CHECK, parameters.NAME, "error", True),
        (divergence.CHECK, parameters.NAME, "warning", False),
        (gradients.CHECK, parameters.NAME, "error", True),
        (gradients.CHECK, divergence.NAME, "error", False),
        (loader.CHECK, divergence.NAME, "warning", True),
        (loader.CHECK, "batch divisibility", "note", False),
    ],
)
def test_a_check_that_would_only_repeat_a_finding_is_left_out(
    check: Check[Any], by: str, severity: Severity, *, left_out: bool
) -> None:
    assert check.redundant is not None
    assert check.redundant([Finding(by, severity, "", "", "")]) is left_out
    assert check.redundant([]) is False
