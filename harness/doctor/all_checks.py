"""Every check of the doctor that ranks make, from the table of config/doctor_checks.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from harness.config.doctor_checks import DOCTOR_CHECKS, DoctorCheck
from harness.doctor.check import Check


def load(row: DoctorCheck) -> Check[Any]:
    """Return the check of a row; raise ImportError if its file names it otherwise."""
    found: Check[Any] = getattr(import_module(f"harness.doctor.{row.file}"), row.place.partition(".")[2])
    if found.name != row.name:
        raise ImportError(
            f"harness/config/doctor_checks.py: {row.place} is named {row.name!r}; "
            f"in harness/doctor/{row.file}.py it is {found.name!r}"
        )
    return found


CHECKS: tuple[Check[Any], ...] = tuple(map(load, DOCTOR_CHECKS))
"""In the order of the table, in which they are observed and judged."""
