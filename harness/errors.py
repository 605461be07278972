"""The exception tree.

HarnessError
├── ExperimentError     the experiment file is wrong            (exit code 2, nothing was started)
├── WorkloadError       the workload, or a strategy of the user's own, cannot be used  (exit code 2 before the run)
├── ClusterError        no cluster, another one, or none on which a cell can run  (exit code 2 before the run)
├── ClusterLostError    the cluster was lost during the run     (exit code 1, recorded results are kept)
├── RunFolderError      a run folder cannot be created, read or resumed  (exit code 2, nothing was started)
├── StoreError          an object store cannot be used, or lacks a run  (exit code 2, nothing was started)
├── ComparisonError     runs cannot be compared, or a question about several runs is wrong  (exit code 2)
├── PredictionError     a run folder, links or sizes from which nothing can be predicted  (exit code 2)
├── ExportError         results cannot be exported as asked     (exit code 2; what was exported before stays)
├── WriteError          a file of the run cannot be written, as on a full disk  (exit code 1, recorded results are kept)
├── InternalError       a bug of the harness, with a log of it  (exit code 1, recorded results are kept)
│   └── IncompleteReport    in report/html.py: of a part of the report; the other parts are written
└── SkipTrial           in plan/trial.py: a trial that cannot run, with its reason (a row, never an exit code)

Each message names the place, the value got, the values allowed and the remedy. The command prints the message of a
HarnessError without a traceback; any other exception is a bug of the harness and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar

Value = TypeVar("Value")
SYNONYMS = {
    "gpu": "cuda",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "dataparallel": "dp",
    "distributeddataparallel": "ddp",
    "fullyshardeddataparallel": "fsdp",
}
"""Other names of a device, a precision or a strategy, with those of experiment files."""
SHORTEST_PART = 4
"""The least characters of a name that is looked for among the words of others, as batch_size in global_batch_size."""


class HarnessError(Exception):
    """Base of all errors that are reported to the user as one message. ``parts``: the errors that it joins."""

    parts: tuple[HarnessError, ...] = ()


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
    """No cluster answered, it is not the requested one, or no cell can run on it."""


class ClusterLostError(HarnessError):
    """Ray, or an actor that the whole run depends on, was lost during the run."""


class RunFolderError(HarnessError):
    """A run folder cannot be created, read or resumed."""


class StoreError(HarnessError):
    """An object store does not answer, refuses, or lacks what is to be copied from it."""


class ComparisonError(HarnessError):
    """Runs cannot be compared as requested, or a question about several runs is wrong."""


class PredictionError(HarnessError):
    """Nothing can be predicted from what was given: a run without its recorded parts, or links of another machine."""


class ExportError(HarnessError):
    """Results cannot be exported: a wrong target, one that does not answer, or an extra that is not installed."""


class WriteError(HarnessError):
    """A file cannot be written during the run: the disk is full, or the folder became read-only."""


class InternalError(HarnessError):
    """The harness failed by an error of its own; recorded results are kept."""


class Collected:
    """Errors that are raised together, so that a user sees all mistakes at once."""

    def __init__(self) -> None:
        self._errors: dict[str, HarnessError] = {}

    @contextmanager
    def also(self, advice: str = "") -> Iterator[None]:
        """Keep a HarnessError that the block raises, instead of raising it; the last of several with ``advice``."""
        try:
            yield
        except HarnessError as error:
            *parts, last = error.parts or (error,)
            for part in (*parts, type(last)(f"{last}{advice}") if advice else last):
                self.add(part)

    def value(self, make: Callable[[], Value]) -> Value | None:
        """Return what ``make`` returns; None if it raises a HarnessError, which is kept."""
        with self.also():
            return make()
        return None

    def add(self, error: HarnessError) -> None:
        """Keep an error; of errors with the same message the first."""
        for part in error.parts or (error,):
            self._errors.setdefault(str(part), part)

    def raise_all(self) -> None:
        """Raise the kept errors, if there are any, as one."""
        errors = list(self._errors.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise _joined(errors)


def _joined(errors: Sequence[HarnessError]) -> HarnessError:
    """Return one error with the text of several."""
    joined: HarnessError
    several = [error for error in errors if isinstance(error, ExperimentError)]
    problems: list[str] = []
    for error in errors:
        if isinstance(error, ExperimentError):
            problems += [f"{error.source}: {problem}" for problem in error.problems]
        else:
            problems.append(str(error))
    if len(several) == len(errors):
        joined = ExperimentError(", ".join(dict.fromkeys(error.source for error in several)), problems)
    else:
        kind = WorkloadError if all(type(error) is WorkloadError for error in errors) else HarnessError
        joined = kind("\n  - ".join([f"{len(problems)} problems", *problems]))
    joined.parts = tuple(errors)
    return joined


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a clause that offers the nearest allowed names, or lists all: 'did you mean ...? (allowed: ...)'."""
    names = sorted(allowed)
    listed = "allowed: " + ", ".join(names) if names else "nothing is allowed here"
    close = closest(name, names)
    return f"did you mean {' or '.join(map(repr, close))}? ({listed})" if close else listed


def closest(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that were probably meant, in the given order; empty if none is near. Case is ignored.

    A name that is very similar, else all that begin with the given words or contain them, else one that is similar.
    """
    by_case = {known.casefold(): known for known in names}
    folded = name.casefold()
    folded = SYNONYMS[folded] if SYNONYMS.get(folded) in by_case else folded
    found = [folded] if folded in by_case else get_close_matches(folded, by_case, n=1, cutoff=0.85)
    if not found and len(folded) >= SHORTEST_PART:
        found = [known for known in by_case if _has_words(known, folded)]
        found = [known for known in found if known.startswith(folded)] or found
    found = found or get_close_matches(folded, by_case, n=1, cutoff=0.6)
    return [by_case[known] for known in found]


def _has_words(known: str, words: str) -> bool:
    """Return whether a name such as global_batch_size contains words such as batch_size or batchsize."""
    parts, wanted = known.split("_"), re.sub(r"[\W_]", "", words)
    spans = ("".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return wanted in spans


def cause_of(error: BaseException) -> str:
    """Return the operating system's message of an error, or the error's own."""
    cause = error.__cause__ if isinstance(error, WriteError) else error
    return str(getattr(cause, "strerror", None) or cause)
