"""A comparison of several runs as a page, as Markdown for a pull request, and as JSON for a program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.analysis.compare import Comparison
from harness.analysis.gate import exit_code
from harness.errors import ComparisonError, WriteError, cause_of
from harness.record.frames import records
from harness.report.compare_summary import sentences
from harness.report.glossary import with_holm_explained
from harness.report.markdown import plain
from harness.report.page import render
from harness.report.tables import compare as tables
from harness.report.tables.text import NO_BREAK, TextTable
from harness.system.files import replace_all

JSON_VERSION = 1
"""Number of the layout of the JSON: raised if a key changes its meaning or goes."""


@dataclass(frozen=True)
class Part:
    """A table of the page under its title, with a sentence above it."""

    title: str
    table: TextTable
    words: str = ""
    level: int = 2
    folded: str = ""
    failure: str = ""

    @property
    def anchor(self) -> str:
        """The part's id in the page."""
        return "-".join(re.findall(r"[a-z]+", self.title.lower()))


def default_page(comparison: Comparison) -> Path:
    """Return the path of the page beside the last run: compare-<first>-<last>.html."""
    first, *_, last = (Path(folder).resolve() for folder in comparison.runs["folder"])
    return last.parent / f"compare-{first.name}-{last.name}.html"


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page; raises ComparisonError if the file cannot be written."""
    write_output(path, as_html(comparison))


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user asked for; raises ComparisonError, since nothing was recorded that could be lost."""
    try:
        replace_all([(path, content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)])
    except WriteError as error:
        raise ComparisonError(f"--output: {path}: cannot be written: {cause_of(error)}; give another file") from None


def as_html(comparison: Comparison) -> str:
    """Return the page, one self-contained file."""
    names = list(dict.fromkeys(comparison.runs["experiment"].tolist()))
    found, parts = sentences(comparison), [part for part in _parts(comparison) if part.table.rows]
    said = with_holm_explained([*found, *(part.words for part in parts)])[len(found) :]
    return render(
        "compare.html",
        title=f"Comparison of {len(comparison.runs)} runs: {', '.join(names)}",
        sentences=found,
        parts=[
            replace(part, table=part.table.without_constants(), words=words)
            for part, words in zip(parts, said, strict=True)
        ],
    )


def _parts(comparison: Comparison) -> Iterator[Part]:
    yield Part("Runs", tables.runs_table(comparison), "A is the first run, with which the others are compared.")
    yield Part("Throughput, cell by cell", tables.cell_table(comparison), tables.METHOD)
    yield Part("Conditions of --fail-if", tables.gate_table(comparison), tables.GATE_METHOD)
    yield Part("Cells without a counterpart", tables.unmatched_table(comparison))
    yield Part("Convergence", tables.convergence_table(comparison), tables.CONVERGENCE_METHOD)
    differing = tables.environment_table(comparison, differing=True)
    yield Part("Environments: what differs", differing)
    yield Part("Environments side by side", tables.environment_table(comparison), level=3, folded="Every recorded fact")


def as_markdown(comparison: Comparison) -> str:
    """Return the sentences and the table of cells as Markdown, for a pull request."""
    lines = ["### Comparison of throughput", ""]
    lines += [f"- {plain(sentence)}" for sentence in sentences(comparison)]
    for part in (tables.cell_table(comparison), tables.gate_table(comparison), tables.runs_table(comparison)):
        if part.rows:
            lines += ["", *_markdown_table(part)]
    return "\n".join(lines)


def _markdown_table(table: TextTable) -> Iterator[str]:
    yield f"| {' | '.join(heading.title for heading in table.columns)} |"
    yield f"|{'|'.join('---:' if heading.number else '---' for heading in table.columns)}|"
    for line in table.rows:
        cells = [plain(cell) for cell in line.cells]
        first = f"**{cells[0]}**" if line.kind == "base" else cells[0]
        yield f"| {' | '.join([first, *cells[1:]])} |"


def as_json(comparison: Comparison) -> str:
    """Return every table as JSON, its keys the columns of results/README.md; a missing value is null."""
    question = comparison.question
    content = {
        "version": JSON_VERSION,
        "by": list(question.by),
        "only": dict(question.only),
        "run_noise": question.run_noise,
        "history": str(comparison.history.folder) if comparison.history else None,
        "fail_if": [str(condition) for condition in comparison.conditions],
        "exit_code": exit_code(comparison.gate) if comparison.conditions else 0,
        "summary": [sentence.replace(NO_BREAK, " ") for sentence in sentences(comparison)],
        "runs": _rows(comparison.runs),
        "cells": _rows(comparison.cells),
        "gate": _rows(comparison.gate),
        "unmatched": _rows(comparison.unmatched),
        "convergence": _rows(comparison.convergence),
        "environment": [
            {
                "name": fact.name,
                "differs": fact.differs,
                "values": dict(zip(comparison.runs["run"], fact.values, strict=True)),
            }
            for fact in comparison.environment
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False)


def _rows(frame: pd.DataFrame) -> list[Mapping[str, object]]:
    return [{name: _plain(value) for name, value in row.items()} for row in records(frame)]


def _plain(value: object) -> object:
    return [str(each) for each in value] if isinstance(value, tuple) else value
