"""The tuple CHECKS: complete, in order, and with the conditions of each check."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.config.doctor_checks import DOCTOR_CHECKS, WITHOUT_RANKS, DoctorCheck
from harness.doctor import (
    all_checks,
    copies,
    divergence,
    gradients,
    loader,
    loss_parameters,
    memory,
    parameters,
    shapes,
    wrapper,
)
from harness.doctor.all_checks import CHECKS
from harness.doctor.check import Check
from harness.plan.checks import links, network, versions
from harness.plan.checks.finding import Finding
from harness.plan.rows import Severity
from tests.doctor.faulty import FAULTS

FOLDER = Path(__file__).parents[2] / "harness" / "doctor"
SHARED = {"steps"}
"""Modules that observe for several checks, and judge nothing."""


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_checks_that_need_no_rank_are_named() -> None:
    assert set(WITHOUT_RANKS) == {links.NAME, network.NAME, versions.NAME}


WRITTEN = sorted(path.stem for path in FOLDER.glob("*.py") if functions(path) & {"observe", "judge"})


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in SHARED])
def test_every_module_that_observes_or_judges_has_a_check_and_it_is_in_the_list(name: str) -> None:
    module = importlib.import_module(f"harness.doctor.{name}")
    own = [key for key, value in vars(module).items() if isinstance(value, Check)]
    assert own, f"harness/doctor/{name}.py observes or judges, and has no Check"
    for key in own:
        assert getattr(module, key) in CHECKS, f"harness/config/doctor_checks.py: DOCTOR_CHECKS lacks {name}.{key}"


OF_NO_FAULTY_WORKLOAD = {"batch divisibility", "GPU copies"}
"""Checks that no workload can fail: test_examine.py has their cases."""


@pytest.mark.parametrize("row", [row for row in DOCTOR_CHECKS if row.name not in OF_NO_FAULTY_WORKLOAD], ids=str)
def test_every_check_has_a_faulty_workload_that_it_must_find(row: DoctorCheck) -> None:
    assert row.findings in FAULTS, f"tests/doctor/faulty.py: FAULTS has no workload for {row.name}"


def test_a_row_is_of_the_file_that_judges() -> None:
    judges = [check.judge.__module__.rpartition(".")[2] for check in CHECKS]
    assert judges == [row.file for row in DOCTOR_CHECKS]


def test_a_row_with_another_name_than_its_file_is_named() -> None:
    row = DOCTOR_CHECKS[0]._replace(name="moves")
    with pytest.raises(ImportError, match=r"doctor_checks.py: transfer.CHECK is named 'moves'; in .*transfer.py"):
        all_checks.load(row)


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
