"""What the doctor says: what was seen, what it means, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
"""error: the numbers would be wrong or the run would fail; warning: they mislead; note: good to know."""


@dataclass(frozen=True)
class Finding:
    """One verdict of one check. ``seen`` has the numbers."""

    check: str
    severity: Severity
    seen: str
    means: str
    advice: str

    def row(self) -> Mapping[str, Any]:
        """Plain values, for the trial's line."""
        return asdict(self)


def join_names(names: list[str], most: int = 4) -> str:
    """A few of many names: ``a, b, c, d and 12 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
