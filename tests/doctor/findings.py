"""What tests say of the findings of a check."""

from __future__ import annotations

from collections.abc import Sequence

from harness.plan.checks.finding import Finding


def only(found: Sequence[Finding], severity: str | None = None, **texts: str) -> Finding:
    """The one finding, of this severity, whose fields contain these texts."""
    (finding,) = found
    assert severity in (None, finding.severity), finding
    for field, text in texts.items():
        assert text in getattr(finding, field), finding
    return finding
