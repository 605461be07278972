"""Cells that are measured despite an error of the doctor: it does not stop them, or the file allows its check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from harness.config.doctor_checks import allowed_findings
from harness.plan.comparison import options_of
from harness.plan.rows import RecordedTrial


def with_faulty(lines: Sequence[RecordedTrial], allow: Collection[str]) -> list[RecordedTrial]:
    """Return the lines with the flag ``faulty``; without it if the file allows no check and there is no such error.

    An error of the doctor concerns every cell of the examined kind: see ``Cell.workload_key``. The latest examination
    of a kind counts.
    """
    names = allowed_findings(allow)
    latest = {line["trial_id"]: line for line in lines if line["purpose"] == "doctor" and "findings" in line["facts"]}
    kinds = {_kind(line) for line in latest.values() if _has_error(line, names)}
    if not (kinds or allow):
        return list(lines)
    return [{**line, "faulty": _kind(line) in kinds} for line in lines]


def _has_error(line: RecordedTrial, names: Collection[str]) -> bool:
    errors = (finding for finding in line["facts"].get("findings", ()) if finding["severity"] == "error")
    return any(finding["check"] in names or not finding.get("stops", True) for finding in errors)


def _kind(line: Mapping[str, object]) -> tuple[str, ...]:
    """Return what cells of one kind share, as ``Cell.workload_key`` does."""
    options = {name: value for name, value in options_of(line).items() if name.startswith("workload.")}
    axes = ("strategy", "data", "model", "device_ids", "variant")
    return (*(str(line.get(axis)) for axis in axes), repr(sorted(options.items())))
