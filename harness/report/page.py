"""Templates of this package -> self-contained HTML pages; parts that fail alone."""

from __future__ import annotations

import base64
import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import jinja2
from markupsafe import Markup

from harness.analysis.common import grouped
from harness.errors import HarnessError
from harness.report.tables.text import TextTable
from harness.system.sanitize import redact_text

SCRIPT = Path(__file__).with_name("sort.js").read_text(encoding="utf-8")
"""The script of every page. A page's policy allows it by its hash, and no other."""
NO_ROWS = TextTable((), ())


def render(template: str, **variables: object) -> str:
    """Return a page; every variable is escaped, and one that the template lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    script_hash = Markup(f"sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}")
    return environment.get_template(template).render(script_hash=script_hash, script=Markup(SCRIPT), **variables)


@dataclass(frozen=True)
class Part:
    """A table of a page under its title, with words above it, or with a sentence on its failure.

    ``folded`` is the line to click if the table is long.
    """

    title: str
    anchor: str
    table: TextTable = NO_ROWS
    words: str = ""
    level: int = 2
    folded: str = ""
    failure: str = ""


Made = TypeVar("Made")


@dataclass(frozen=True)
class Failure:
    """A part that could not be made, and the error of the harness that is the cause."""

    part: str
    error: Exception

    @property
    def cause(self) -> str:
        """The error and its line: 'KeyError: 'rate', in ratios.py line 41'."""
        place = traceback.extract_tb(self.error.__traceback__)[-1]
        found = f"{type(self.error).__name__}: {' '.join(str(self.error).split())[:200]}"
        return redact_text(f"{found}, in {Path(place.filename).name} line {place.lineno}")

    @property
    def trace(self) -> str:
        return "".join(traceback.format_exception(self.error))


@dataclass
class Parts:
    """Makes parts one by one and keeps the failures. ``log``: the name of their log in the run folder's logs/."""

    log: str = "report"
    failures: list[Failure] = field(default_factory=list)

    def make(self, part: str, function: Callable[[], Made], otherwise: Callable[[str], Made]) -> Made:
        """Return what ``function`` does or, if it fails, what ``otherwise`` makes of a sentence on the failure.

        The harness's own errors, such as that of a damaged file, are raised.
        """
        try:
            return function()
        except HarnessError:
            raise
        except Exception as error:
            failure = Failure(part, error)
            self.failures.append(failure)
            return otherwise(f"{failed([part], failure.cause)} (traceback: logs/{self.log}.txt).")

    @property
    def lines(self) -> list[str]:
        """A sentence on each cause: a table that failed may be needed by many parts."""
        causes = grouped(self.failures, lambda failure: failure.cause)
        return [failed([failure.part for failure in alike], cause) for cause, alike in causes.items()]

    @property
    def tracebacks(self) -> str:
        causes = grouped(self.failures, lambda failure: failure.cause)
        return "\n".join(f"{cause}\n{alike[0].trace}" for cause, alike in causes.items())


def failed(parts: Sequence[str], cause: str) -> str:
    """Return 'the table scaling, the section Memory failed by an error of the harness: KeyError: ...'."""
    return f"{', '.join(parts)} failed by an error of the harness: {cause}"
