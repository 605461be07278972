"""A finding of the doctor: observation, meaning, advice."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan.rows import FindingRow, Severity


@dataclass(frozen=True)
class Finding:
    """One finding of one check. ``seen`` has the numbers."""

    check: str
    severity: Severity
    seen: str
    means: str
    advice: str

    def row(self) -> FindingRow:
        """Return plain values for the trial's row."""
        return {
            "check": self.check,
            "severity": self.severity,
            "seen": self.seen,
            "means": self.means,
            "advice": self.advice,
        }


def join_names(names: list[str], most: int = 4) -> str:
    """Join at most ``most`` names: ``a, b, c, d and 12 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
