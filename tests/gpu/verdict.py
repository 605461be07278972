"""The verdict of a claim: pass, FAIL, measured (no bound) or not run, with a text and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pass", "FAIL", "measured", "not run"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one claim. ``figures``: its numbers by name, for the file."""

    status: Status
    text: str
    figures: Mapping[str, float | str | None] = field(default_factory=dict)


class NotRun(Exception):
    """Raised by a claim that this machine cannot answer; its message is the reason."""


def judged(holds: bool, text: str, **figures: float | str | None) -> Verdict:
    """Return pass if the claim holds, else FAIL."""
    return Verdict("pass" if holds else "FAIL", text, figures)


def measured(text: str, **figures: float | str | None) -> Verdict:
    """Return figures that have no bound."""
    return Verdict("measured", text, figures)
