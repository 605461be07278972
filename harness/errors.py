"""The exception tree.

HarnessError
├── ExperimentError     the experiment file is wrong            (exit code 2, nothing was started)
├── WorkloadError       the workload, or a strategy of the user's own, cannot be used  (exit code 2 before the run)
├── ClusterError        no cluster, or not the requested one    (exit code 2 before the run)
├── ClusterLostError    the cluster was lost during the run     (exit code 1, recorded results are kept)
├── RunFolderError      a run folder cannot be created, read or resumed  (exit code 2, nothing was started)
├── WriteError          a file of the run cannot be written, as on a full disk  (exit code 1, recorded results are kept)
├── InternalError       a bug of the harness, with a log of it  (exit code 1, recorded results are kept)
└── SkipTrial           in plan/trial.py: a trial that cannot run, with its reason (a row, never an exit code)

Each message names the place, the value got, the values allowed and the remedy. The command prints the message of a
HarnessError without a traceback; any other exception is a bug of the harness and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HarnessError(Exception):
    """Base of all errors that are reported to the user as one message."""


class ExperimentError(HarnessError):
    """The experiment file is wrong; ``problems`` lists every problem found."""

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
    """No cluster answered, or it is not the requested one."""


class ClusterLostError(HarnessError):
    """Ray, or an actor that the whole run depends on, was lost during the run."""


class RunFolderError(HarnessError):
    """A run folder cannot be created, read or resumed."""


class WriteError(HarnessError):
    """A file cannot be written during the run: the disk is full, or the folder became read-only."""


class InternalError(HarnessError):
    """The harness failed by an error of its own; recorded results are kept."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a clause that offers the nearest allowed name, or lists all: 'did you mean ...? (allowed: ...)'."""
    names = sorted(allowed)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    listed = "allowed: " + ", ".join(names) if names else "nothing is allowed here"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def cause_of(error: BaseException) -> str:
    """Return the operating system's message of an error, or the error's own."""
    cause = error.__cause__ if isinstance(error, WriteError) else error
    return str(getattr(cause, "strerror", None) or cause)
