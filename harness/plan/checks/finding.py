"""A finding of the doctor: observation, meaning, advice."""

from __future__ import annotations

from dataclasses import dataclass

from harness.plan.rows import FindingRow, Severity


@dataclass(frozen=True)
class Finding:
    """One finding of one check. ``seen`` has the numbers.

    ``stops``: an error after which no trial is tried: no training step, another device, a crash or a loss that is not
    finite. After other errors cells are measured, and marked as faulty.
    """

    check: str
    severity: Severity
    seen: str
    means: str
    advice: str
    stops: bool = False

    def row(self) -> FindingRow:
        """Return plain values for the trial's row."""
        row: FindingRow = {
            "check": self.check,
            "severity": self.severity,
            "seen": self.seen,
            "means": self.means,
            "advice": self.advice,
        }
        return {**row, "stops": self.stops} if self.severity == "error" else row


def join_names(names: list[str], most: int = 4) -> str:
    """Join at most ``most`` names: ``a, b, c, d and 12 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
