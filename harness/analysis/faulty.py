"""Cells that are measured despite an error of the doctor, since the experiment file allows its check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from harness.config.doctor_checks import allowed_findings
from harness.plan.comparison import options_of
from harness.plan.rows import RecordedTrial


def with_faulty(lines: Sequence[RecordedTrial], allow: Collection[str]) -> list[RecordedTrial]:
    """Return the lines with the flag ``faulty``; without it if the file allows no check.

    An error of the doctor concerns every cell of the examined kind: see ``Cell.workload_key``. The latest examination
    of a kind counts.
    """
    if not allow:
        return list(lines)
    names = allowed_findings(allow)
    latest = {line["trial_id"]: line for line in lines if line["purpose"] == "doctor" and "findings" in line["facts"]}
    kinds = {_kind(line) for line in latest.values() if _has_error(line, names)}
    return [{**line, "faulty": _kind(line) in kinds} for line in lines]


def _has_error(line: RecordedTrial, names: Collection[str]) -> bool:
    found = line["facts"].get("findings", ())
    return any(finding["severity"] == "error" and finding["check"] in names for finding in found)


def _kind(line: Mapping[str, object]) -> tuple[str, ...]:
    """Return what cells of one kind share, as ``Cell.workload_key`` does."""
    options = {name: value for name, value in options_of(line).items() if name.startswith("workload.")}
    axes = ("strategy", "data", "model", "device_ids", "variant")
    return (*(str(line.get(axis)) for axis in axes), repr(sorted(options.items())))
