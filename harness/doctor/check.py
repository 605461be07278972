"""The type of a check: an observation on each rank, and findings from the observations of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Generic, TypeVar

from harness.doctor.steps import Steps
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.plan.checks import Finding
from harness.plan.rows import MemoryFacts
from harness.system.user_code import is_the_users

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A cell as it is examined, and the real steps of every rank: empty before they are taken.

    ``planned``: the planned cell, if it is examined with another batch or without compilation. ``memory``: the sizes of
    the model; None if it cannot be built.
    """

    cell: Cell
    steps: Sequence[Steps] = ()
    planned: Cell | None = None
    memory: MemoryFacts | None = None


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a cell. ``T``: the observation of one rank, which is sent to every rank: it must be picklable.

    By default each rank observes alone, before any real step, and the observations are judged at once; if one raises,
    the check is left out, with a finding. ``needs_peers`` and ``needs_steps`` change this.
    """

    name: str
    """Unique. Findings may have another name, if several checks share it."""
    observe: Callable[[Subject], T] | None
    """None: the check judges ``Case.steps``, the real steps."""
    judge: Callable[[Sequence[T], Case], Sequence[Finding]]
    """The findings from the observations of all ranks, in the order of the ranks; the same on every rank."""
    needs_peers: bool = False
    """The observation is made after the real steps, by all ranks at the same time: it may call collectives."""
    needs_steps: bool = False
    """The observation is made by each rank alone, but judged after the real steps."""
    needs_whole_model: bool = False
    """The observation has the whole model on one device; it is left out if the model does not fit there."""
    stops: bool = False
    """After an error of this check no real step is taken."""
    redundant: Callable[[Sequence[Finding]], bool] | None = None
    """Given the earlier findings, returns True if this check would only repeat them; it is then left out."""
    figures: Callable[[Sequence[T], Case], Mapping[str, str]] | None = None
    """Measurements in words, by title; reported also if the check is redundant."""
    about: tuple[str, ...] = ()
    """The methods of the workload, or ``forward`` of its model, that its findings are about."""
    clue: str = ""
    """A pattern of the lines in these methods that cause findings."""

    @property
    def after_steps(self) -> bool:
        """The check is judged after the real steps."""
        return self.observe is None or self.needs_peers or self.needs_steps


def describe_error(error: BaseException, most: int = 300) -> str:
    """Return an exception's type and the first ``most`` characters of its message, on one line, with its place.

    A longer message ends with a whole word and an ellipsis. The place is the last line of the user's own code on the
    way to the error, if there is one.
    """
    frames = [frame for frame in extract_tb(error.__traceback__) if is_the_users(frame.filename)]
    place = f" [{frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    text = " ".join(str(error).split())
    if len(text) > most:
        text = f"{text[:most].rpartition(' ')[0] or text[:most]} ..."
    return f"{type(error).__name__}: {text}{place}"


def any_error(findings: Sequence[Finding]) -> bool:
    """Return whether there is an error among the findings."""
    return any(finding.severity == "error" for finding in findings)
