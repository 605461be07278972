"""The distributions that the harness needs and this Python lacks, each as NAME==VERSION.

known_good.txt has one line for each distribution: a version that works at pyproject's lower bounds on Python 3.12, and
the names that this version needs. ``python -m tests.gpu.modules`` prints such a file from the environment it runs in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
KNOWN_GOOD = Path(__file__).with_name("known_good.txt")
MODULES = {"yaml": "pyyaml", "sklearn": "scikit-learn", "PIL": "pillow", "pynvml": "nvidia-ml-py"}
"""Modules whose distribution has another name."""
WITH_TORCH = ("triton", "cuda-", "nvidia-c", "nvidia-n", "sympy", "networkx", "mpmath")
"""Beginnings of names of distributions that come with torch."""


class Known(NamedTuple):
    """A version that works, and the names of the distributions that it needs."""

    version: str
    needs: tuple[str, ...]


def known_good(text: str) -> dict[str, Known]:
    """Return the lines of known_good.txt by name: ``NAME==VERSION NAME NAME ...``."""
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {first.partition("==")[0]: Known(first.partition("==")[2], tuple(rest)) for first, *rest in lines}


def required() -> dict[str, frozenset[str]]:
    """Return the project's own requirements, without those for its tests: names with their extras."""
    section = PYPROJECT.read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    lines = re.findall(r'"([^"]+)"', section)
    return {_normal(line): frozenset(re.findall(r"\[([\w,]+)\]", line)) for line in lines}


def missing() -> list[str]:
    """Return NAME==VERSION of each distribution that is needed, directly or not, and not installed."""
    known = known_good(KNOWN_GOOD.read_text())
    lacking = [name for name, needs in _reached(known).items() if needs is None]
    return [requirement_of(name, known) for name in sorted(lacking)]


def _reached(known: Mapping[str, Known]) -> dict[str, tuple[str, ...] | None]:
    """Return each distribution that is needed and what it needs itself; None if it is not installed."""
    found: dict[str, tuple[str, ...] | None] = {}
    roots = required()
    names = list(roots)
    for name in names:  # grows
        found[name] = _needs(name, roots.get(name, frozenset()))
        needed = found[name] if found[name] is not None else known[name].needs if name in known else ()
        names += [other for other in needed or () if other not in names]
    return found


def requirement_of(module: str, known: Mapping[str, Known] | None = None) -> str:
    """Return NAME==VERSION of a distribution, or of the one that a missing module belongs to."""
    name = _normal(MODULES.get(module, module))
    known = known_good(KNOWN_GOOD.read_text()) if known is None else known
    return f"{name}=={known[name].version}" if name in known else name


def _normal(requirement: str) -> str:
    """Return the name in a requirement, normalised as PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0]).lower()


def _needs(name: str, extras: frozenset[str] = frozenset()) -> tuple[str, ...] | None:
    """Return what an installed distribution needs here, but for what comes with torch; None if not installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    needed = sorted({_normal(line) for line in found.requires or () if _applies(line, extras)})
    return tuple(other for other in needed if not other.startswith(WITH_TORCH))


def _applies(requirement: str, extras: frozenset[str]) -> bool:
    """Return whether a requirement's marker holds here; without packaging, True for older Pythons' too."""
    marker = requirement.partition(";")[2].strip()
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
    if extra and extra[1] not in extras:
        return False
    try:
        from packaging.markers import Marker
    except ImportError:
        return "win" not in marker
    return not marker or Marker(marker).evaluate({"extra": extra[1] if extra else ""})


def _lines() -> Iterator[str]:
    """Yield the lines of known_good.txt for what is installed here."""
    for name, needs in sorted(_reached({}).items()):
        yield " ".join((f"{name}=={distribution(name).version}", *(needs or ())))


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in _lines()))
