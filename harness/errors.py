"""What can go wrong, as one tree.

HarnessError
├── ExperimentError     the experiment file is wrong            (exit code 2, nothing was started)
├── WorkloadError       the workload cannot be used as asked    (exit code 2 before the run)
├── ClusterError        no cluster, or not the one asked for    (exit code 2 before the run)
├── ClusterLostError    the cluster was lost in mid-run           (exit code 1, what is recorded is kept)
├── RunFolderError      a run folder cannot be made, read or resumed  (exit code 2, nothing was started)
├── WriteError          a file of the run cannot be written: a full disk  (exit code 1, what is recorded is kept)
└── SkipTrial           in plan/trial.py: a trial that cannot run here, with its reason (a row, never an exit code)

Each message says where, what was got, what is allowed and what to do. The command prints the message of a
HarnessError without a traceback; anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HarnessError(Exception):
    """Base of all errors that are told to the user as one message."""


class ExperimentError(HarnessError):
    """The experiment file is wrong; carries every problem found."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{source}: {count} problem{'s' if count > 1 else ''}\n{lines}")

    def __reduce__(self) -> tuple[type[ExperimentError], tuple[str, tuple[str, ...]]]:
        return ExperimentError, (self.source, self.problems)


class WorkloadError(HarnessError):
    """The workload cannot be imported, or does not accept what the experiment asks of it."""


class ClusterError(HarnessError):
    """No cluster answered, or it is not the one that was asked for."""


class ClusterLostError(HarnessError):
    """Ray, or a process of ours on it that all need, is gone in mid-run."""


class RunFolderError(HarnessError):
    """A run folder cannot be made, read or resumed."""


class WriteError(HarnessError):
    """A file cannot be written in mid-run: the disk is full, or the folder became read-only."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A clause that offers the nearest allowed name, or lists them all: '; did you mean ...?'."""
    names = sorted(allowed)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    listed = "allowed: " + ", ".join(names) if names else "nothing is allowed here"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def cause_of(error: BaseException) -> str:
    """What the system said, in its words."""
    cause = error.__cause__ if isinstance(error, WriteError) else error
    return str(getattr(cause, "strerror", None) or cause)
