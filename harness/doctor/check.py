"""One check: what a rank observes, and what follows from the observations of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.doctor.steps import Steps
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A cell, and the real steps of every rank: empty before they are taken."""

    cell: Cell
    steps: Sequence[Steps] = ()


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a cell. ``T``: what one rank observes; it is sent to every rank, so it must be picklable.

    An observation is made by each rank alone, before any step, and judged at once. If it raises, the check is left
    out, and a finding says so. See ``needs_peers`` and ``needs_steps`` for the others.
    """

    name: str
    """Unique. The findings may have another name, which several checks share."""
    observe: Callable[[Subject], T] | None
    """None: the observation is ``Steps``, which all such checks share."""
    judge: Callable[[Sequence[T], Case], Sequence[Finding]]
    """The findings from the observations of all ranks, in the order of the ranks; the same on every rank."""
    needs_peers: bool = False
    """The observation is made after the real steps, by all ranks at the same time: it may call collectives."""
    needs_steps: bool = False
    """The observation is made by each rank alone, but judged after the real steps."""
    stops: bool = False
    """After an error of this check no real step is taken."""
    redundant: Callable[[Sequence[Finding]], bool] | None = None
    """Whether, given the findings of the earlier checks, this one would only repeat them: it is left out."""
    figures: Callable[[Sequence[T], Case], Mapping[str, str]] | None = None
    """What was measured, in words, by title; also if the check is redundant."""

    @property
    def after_steps(self) -> bool:
        """Whether it is judged after the real steps."""
        return self.observe is None or self.needs_peers or self.needs_steps


def any_error(findings: Sequence[Finding]) -> bool:
    """Return whether there is an error among the findings."""
    return any(finding.severity == "error" for finding in findings)
