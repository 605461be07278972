"""Places in the user's code that findings are about: file and line of the workload's methods and of its model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from inspect import getsourcelines, unwrap
from pathlib import Path
from typing import NamedTuple

from harness.config.doctor_checks import DOCTOR_CHECKS
from harness.doctor.all_checks import CHECKS
from harness.doctor.builds import FewBuilds
from harness.doctor.check import is_the_users
from harness.train.workloads import Workload

ABOUT: Mapping[str, tuple[str, ...]] = {
    row.findings: check.about for row, check in zip(DOCTOR_CHECKS, CHECKS, strict=True) if check.about
}
"""The name of a check's findings -> the methods of the workload, or of its model, to look at first."""
CLUES: Mapping[str, str] = {
    row.findings: check.clue for row, check in zip(DOCTOR_CHECKS, CHECKS, strict=True) if check.clue
}
"""The name of a check's findings -> a pattern of the line that causes them: the place if one line alone matches."""


class Method(NamedTuple):
    """A method of the user's own: its name, the name of its file, its lines from the number of the first."""

    name: str
    file: str
    first: int
    lines: tuple[str, ...] = ()

    def at(self, number: int) -> str:
        return f"{self.name} ({self.file}:{number})"

    def matches(self, pattern: str) -> Iterator[str]:
        """Yield the place of each line of code that matches; what follows a # counts as a comment."""
        for number, line in enumerate(self.lines, self.first):
            if re.search(pattern, line.partition("#")[0]):
                yield self.at(number)


def place_of(check: str, methods: Mapping[str, Method]) -> str:
    """Return the places that a check's findings are about: 'Net.forward (mine.py:8), Mine.loss (mine.py:20)'.

    If one line alone of these methods looks like the cause, its place; else the first line of each method.
    """
    about = list(dict.fromkeys(methods[name] for name in ABOUT.get(check, ()) if name in methods))
    clue = CLUES.get(check)
    lines = [place for method in about for place in method.matches(clue)] if clue else []
    return lines[0] if len(lines) == 1 else ", ".join(method.at(method.first) for method in about)


def methods_of(workload: Workload) -> Mapping[str, Method]:
    """Return the methods of the workload and of its model; those of the harness and of libraries are left out.

    If the model's class is a library's, as nn.Sequential is, ``build_model`` stands for it.
    """
    own, model = (workload.inner, workload.kept.kind) if isinstance(workload, FewBuilds) else (workload, None)
    found = {name: _method(type(own), name) for name in ("build_model", "datasets", "loss")}
    found["forward"] = (model and _method(model, "forward")) or found["build_model"]
    return {name: method for name, method in found.items() if method}


def _method(owner: type, name: str) -> Method | None:
    function = unwrap(getattr(owner, name, len))
    code = getattr(function, "__code__", None)
    if code is None or not is_the_users(code.co_filename):
        return None
    try:
        lines, first = getsourcelines(code)
    except (OSError, TypeError):  # its file is gone
        lines, first = [], code.co_firstlineno
    return Method(function.__qualname__, Path(code.co_filename).name, first, tuple(lines))
