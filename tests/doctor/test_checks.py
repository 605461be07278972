"""The tuple CHECKS: complete, in order, and with the conditions of each check."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from harness.config.doctor_checks import DOCTOR_CHECKS, LOOKS_AT, WITHOUT_RANKS
from harness.doctor import gradients, parameters, speed
from harness.doctor.examine import CHECKS
from harness.doctor.subject import Check
from harness.plan import checks
from harness.plan.checks import Finding
from harness.plan.rows import Severity
from tests.doctor.faulty import FAULTS

FOLDER = Path(__file__).parents[2] / "harness" / "doctor"
SHARED = {"real_steps"}
"""Modules that observe for several checks, and judge nothing."""


WRITTEN = {path.stem for path in FOLDER.glob("*.py") if re.search("^def (observe|judge)", path.read_text(), re.M)}


@pytest.mark.parametrize("name", sorted(WRITTEN - SHARED))
def test_every_module_that_observes_or_judges_has_a_check_and_it_is_in_the_list(name: str) -> None:
    members = vars(importlib.import_module(f"harness.doctor.{name}")).items()
    own = {f"{name}.{key}" for key, check in members if isinstance(check, Check)}
    assert own, f"harness/doctor/{name}.py observes or judges, and has no Check"
    lacking = own - {row.place for row in DOCTOR_CHECKS}
    assert not lacking, f"harness/config/doctor_checks.py: DOCTOR_CHECKS lacks {lacking}"


OF_NO_FAULTY_WORKLOAD = {"batch divisibility", "GPU copies", "collectives"}
"""Checks that no workload can fail: test_judges.py has their cases."""


def test_a_row_is_of_the_file_that_judges_and_has_its_name_and_a_faulty_workload() -> None:
    lacking = {row.name for row in DOCTOR_CHECKS if row.findings not in FAULTS} - OF_NO_FAULTY_WORKLOAD
    assert not lacking, f"tests/doctor/faulty.py: FAULTS has no workload for {lacking}"
    assert [*LOOKS_AT] == [*(row.name for row in DOCTOR_CHECKS), *WITHOUT_RANKS]
    judges = [(check.observe or check.judge).__module__.rpartition(".")[2] for check in CHECKS]
    assert judges == [row.place.partition(".")[0] for row in DOCTOR_CHECKS]


def test_the_names_and_the_order_of_the_checks() -> None:
    names = [*WITHOUT_RANKS, *(check.name for check in CHECKS)]
    assert len(names) == len({*names})
    assert set(WITHOUT_RANKS) == {checks.LINKS, checks.NETWORK, checks.MACHINE, checks.VERSIONS}
    alone, after = ([check.name for check in CHECKS if check.after_steps is later] for later in (False, True))
    assert [check.name for check in CHECKS] == [*alone, *after]
    # the wrapper before what it explains; the two rates last, when nothing else can still be found
    assert after.index(parameters.WRAPPER) < after.index(parameters.NAME) < after.index(gradients.DIVERGENCE)
    assert after[-3:] == [gradients.NAME, speed.NAME, "collectives"]
    stopping = [check.name for check in CHECKS if check.stops]
    assert stopping == ["loss parameters", "output shapes", "memory", "GPU copies"]


@pytest.mark.parametrize(
    ("check", "by", "severity", "left_out"),
    [
        (parameters.CHECK, parameters.WRAPPER, "error", True),
        (parameters.CHECK, "data sharding", "error", False),
        (gradients.DIVERGENCE_CHECK, parameters.NAME, "error", True),
        (gradients.DIVERGENCE_CHECK, parameters.NAME, "warning", False),
        (gradients.CHECK, parameters.NAME, "error", True),
        (gradients.CHECK, gradients.DIVERGENCE, "error", False),
        (speed.CHECK, gradients.DIVERGENCE, "warning", True),
        (speed.CHECK, "batch divisibility", "note", False),
    ],
)
def test_a_repeating_check_is_left_out(check: Check[Any], by: str, severity: Severity, *, left_out: bool) -> None:
    assert check.redundant is not None
    assert check.redundant([Finding(by, severity, "", "", "")]) is left_out
    assert check.redundant([]) is False
