"""Values of one section that do not fit each other: all of them are reported, each with the keys that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Conflict(NamedTuple):
    """A rule about several keys of a section. ``keys``: without one of these, or with a wrong one, nothing is known."""

    broken: bool
    text: str
    keys: tuple[str, ...]


class Conflicts(ValueError):
    """The broken rules of one section, raised by its validator."""

    def __init__(self, broken: Sequence[Conflict]) -> None:
        self.broken = tuple(broken)
        super().__init__("; ".join(conflict.text for conflict in broken))


def raise_conflicts(*rules: Conflict) -> None:
    """Raise Conflicts if some of these rules are broken."""
    if broken := [rule for rule in rules if rule.broken]:
        raise Conflicts(broken)
